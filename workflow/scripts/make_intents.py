"""Build the default example data set: English home commands with their intent as JSON.

Reads no file: the package `home-assistant-intents` has the sentence templates, `hassil` words
and labels them. Writes JSONL: `prompt` (the command), `completion` (the intent and its slots, as
JSON), `intent` (its name alone, the class of the row) and `template` (the id of the template that
made the row). Split by it: rows of a template are near copies.
"""

import argparse
import json
import random
import re
from collections import deque
from pathlib import Path

from hassil import Intents, Sentence, TextSlotList, check_required_context, parse_sentence
from hassil.recognize import RecognizeResult, recognize_ranked
from hassil.sample import sample_sentence
from home_assistant_intents import get_intents

from finetune.cli import UserError, run_script, say
from finetune.files import write_aside

# The blocks of sentences used, by the package's own name for the slots that they fill.
# Left out: clumsy combinations, and near copies of a block for another kind of place.
INTENTS = {
    "HassTurnOn": "area_domain area_device_class_cover name_only",
    "HassTurnOff": "area_domain area_device_class_cover domain_all name_only",
    "HassLightSet": "area_brightness area_color name_brightness name_color",
    "HassClimateSetTemperature": "area_temperature floor_temperature name_temperature",
    "HassStartTimer": "minutes_only hours_only hours_minutes name_minutes command_minutes",
    "HassCancelTimer": "default area_only name_only hours_only minutes_only",
    "HassSetVolume": "area_only name_only",
    "HassGetState": "device_class_state_area domain_state name_state",
}
DEVICES = {
    "light": "desk lamp,bedside lamp,porch light,night light,chandelier",
    "switch": "coffee maker,christmas tree", "fan": "ceiling fan,table fan",
    "media_player": "tv,radio,stereo,smart speaker",
    "climate": "thermostat,heat pump,air conditioner", "lock": "front door,back door,cellar door",
    "cover": "garage door,patio awning,skylight,roller shutter",
}  # fmt: skip
# Everyday values, in place of full ranges and of wildcards. No duration is 1, 8, 11 or 18:
# those need another plural or article.
VALUES = {
    "area": "kitchen,living room,bedroom,bathroom,hallway,office,dining room,guest room,attic",
    "floor": "ground floor,first floor,top floor", "zone": "home,outside,upstairs",
    "brightness": "10,25,30,40,50,60,75,80,100", "brightness_level": "maximum,minimum",
    "color": "white,red,orange,yellow,green,blue,purple,pink,turquoise",
    "temperature": "17,18,19,20,21,22,23,24", "on_off_states": "on,off",
    "cover_classes": "blinds,curtains,shutters,windows,doors", "cover_states": "open,closed",
    "lock_states": "locked,unlocked", "volume": "10,20,30,40,50,60,70,80,90",
    "timer_hours": "2,3,4,5,6", "timer_minutes": "2,3,5,10,12,15,20,25,30,45", "timer_half": "half",
    "timer_name": "pasta,pizza,tea,laundry,egg,workout,homework",
    "timer_command": "turn off the lights,close the blinds,stop the music,lock the door",
}  # fmt: skip
LISTS = {name: TextSlotList.from_strings(texts.split(",")) for name, texts in VALUES.items()}
NAMES = [(name, name, {"domain": kind}) for kind in DEVICES for name in DEVICES[kind].split(",")]
LISTS["name"] = TextSlotList.from_tuples(NAMES)
# The places and devices of the home. hassil reads all else with the package's own lists.
HOME = {name: LISTS[name] for name in ("area", "floor", "name")}
# The package's own rules accept much that nobody says. These replace them when sampling.
RULES = {
    "the": "the", "in": "in", "all": "all the", "any": "any", "which": "which", "are": "are",
    "is": "(is|are)", "how_many": "how many", "light": "(light|lights)", "open": "open",
    "close": "(close|shut)", "turn": "(turn|switch)", "set": "(set|change|turn)",
    "numeric_value_set": "(set|change|turn (up|down))", "lockable": "(doors|windows)",
    "everywhere": "(everywhere|in the [whole] house)", "home": "house",
}  # fmt: skip
# What is left that hassil accepts and nobody writes. First, a sentence without its verb.
CLUMSY = re.compile(
    r"""(?x)^(?!adjust|after|are|cancel|change|close|create|how|illuminate|in|is|light\ up|lights\ o
        |lock|open|play|set|shut|start|stop|switch|turn|unlock|which|who) | (\S+\ ){14}  # too long
    | \b(\w+)\ \2\b | house\b.*\bhouse | (lamp|light|chandelier)\ lights?\b     # the lamp lights
    | \b(all|any|many|which)\b.*\b(light|fan|switch)\b | many\ .*\bis\b | s\ is\b | persons
    | ^are\ (?!any|all) | \b(in|of)\ (?!the\b|all\b|\d) | (in|the)\ (home|outside|upstairs)\b
    | ^(are|how|is|lights|which)\b.*\ (on|off|out|open|closed)\ (?!in\b)    # lights on the attic
    | (lights?|brightness)\ (?!(after|are|brightness|color|in|of|off|on|out|to)\b)
    | \bto\ (on|off|out)\b | switch\b.*\ out\b | turn\ .*\bcolor            # turn the tv to off
    | (hour|minute)s\ timer | \d-\w+s\b | hours\ .*minute\ timer | minute$ | degree\b | \ [°%]
    | (after|for|in)\ \d+[ -](hour|minute)\b | \ban\ (timer|\d) | and\ half | half\ (hour\b|an.*s$)
    | turn\ (up\ .*minimum|down\ .*maximum)
    | volume\ (?!(to|up|down|in|on)\b) | ^(?!.*volume).*(up|down)\ to\ \d  # the volume attic
    | (\d|%|percent)\ (the|tv|radio|stereo|smart|attic|office|bed|kitchen|hall|bath|liv|din|gue)
    | (?<!\ to)\ \d+(%|\ percent)?(\ brightness)?$ | (?<!\ to)(?<!\ to\ the)\ m(ax|in)imum"""
)
TRIES = 20  # draws without a new row after which a template counts as used up


def templates_of(intent: str, intents: Intents) -> list[tuple[str, Sentence, dict]]:
    """Return id, sentence and word lists of the chosen templates, one for each text.

    A block that accepts none of our devices is left out. So is one that needs the speaker's
    room, since its label could not be told from the prompt.
    """
    found = {}
    for data in intents.intents[intent].data:
        needs = data.requires_context
        names = [v for v in LISTS["name"].values if check_required_context(needs, v.context)]
        if names and data.metadata["slot_combination"] in INTENTS[intent].split():
            for sentence in data.sentences:
                lists = LISTS | {"name": TextSlotList("name", names)}
                found.setdefault(sentence.text, (f"{intent}/{len(found)}", sentence, lists))
    return list(found.values())


def draw_prompt(sentence: Sentence, lists: dict, rules: dict, rng: random.Random) -> str | None:
    """Return a random natural wording of a template, or None if this draw has none.

    Each list is cut to one random value first, as hassil goes through every combination.
    """
    one = {name: TextSlotList(name, [rng.choice(lists[name].values)]) for name in lists}
    texts = map(str.strip, sample_sentence(sentence, one, rules))
    natural = [text for text in texts if not CLUMSY.search(text)]
    return rng.choice(natural) if natural else None


def label(reading: RecognizeResult) -> str:
    """Return the intent as JSON: its name, then the slots in order. hassil reads 40 as 40.0."""
    slots = {entity.name: entity.value for entity in reading.entities_list}
    whole = {name: int(v) for name, v in slots.items() if isinstance(v, float) and v == int(v)}
    return json.dumps({"intent": reading.intent.name} | dict(sorted((slots | whole).items())))


def read_back(prompt: str, intents: Intents) -> RecognizeResult | None:
    """Return hassil's best reading of a prompt, or None if it has none or is ambiguous.

    A reading that leaves more text to wildcards is no rival: "play {anything}" reads all.
    """
    readings = recognize_ranked(prompt, intents, slot_lists=HOME)
    guessed = [sum(len(e.text) for e in r.entities_list if e.is_wildcard) for r in readings]
    labels = {label(r) for r, size in zip(readings, guessed, strict=True) if size <= guessed[0]}
    return readings[0] if len(labels) == 1 else None


def rows_of(intent: str, count: int, intents: Intents, rng: random.Random) -> list[dict]:
    """Return rows of one intent, from its templates in turn so that they weigh the same.

    A row counts only if hassil reads its prompt with the very template that made it.
    """
    rules = intents.expansion_rules | {name: parse_sentence(text) for name, text in RULES.items()}
    rows, rotation = {}, deque(templates_of(intent, intents))
    while rotation and len(rows) < count:
        name, sentence, lists = rotation.popleft()
        for _ in range(TRIES):
            prompt = draw_prompt(sentence, lists, rules, rng)
            reading = read_back(prompt, intents) if prompt and prompt not in rows else None
            if reading and reading.intent_sentence.text == sentence.text:
                row = {"prompt": prompt, "completion": label(reading), "intent": intent}
                rows[prompt] = row | {"template": name}
                rotation.append((name, sentence, lists))
                break
    return list(rows.values())


def build_rows(count: int, seed: int) -> list[dict]:
    """Return the rows of the data set, as many of each intent, mixed."""
    rng, intents, rows = random.Random(seed), Intents.from_dict(get_intents("en")), []
    for index, intent in enumerate(INTENTS):
        rows += rows_of(intent, (count + index) // len(INTENTS), intents, rng)
    if len(rows) < count:
        raise UserError(f"only {len(rows)} of {count} rows can be made: ask for fewer")
    rng.shuffle(rows)
    return rows


def main() -> None:
    """Write the rows aside, rename the file, and print what it holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    rows = build_rows(args.rows, args.seed)
    with write_aside(args.output) as aside:
        aside.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")
    templates = {row["template"] for row in rows}
    say(f"{len(rows)} rows, {len(INTENTS)} intents, {len(templates)} templates")


if __name__ == "__main__":
    run_script(main)
