"""The example data set: its size and balance, and that hassil reads every row as labelled."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from hassil import Intents, recognize_best
from home_assistant_intents import get_intents

import make_intents
from finetune.cli import UserError

ROWS = 450


@pytest.fixture(scope="module")
def rows():
    return make_intents.build_rows(ROWS, seed=7)


@pytest.fixture(scope="module")
def intents():
    return Intents.from_dict(get_intents("en"))


def test_rows_are_balanced_over_eight_intents(rows):
    counts = Counter(json.loads(row["completion"])["intent"] for row in rows)
    assert sum(counts.values()) == ROWS
    assert len(counts) == 8
    assert set(counts.values()) == {ROWS // 8, ROWS // 8 + 1}


def test_templates_are_many_small_and_of_one_intent(rows):
    counts = Counter(row["template"] for row in rows)
    assert len(counts) >= 100
    assert max(counts.values()) <= 10
    for row in rows:
        assert row["template"].split("/")[0] == json.loads(row["completion"])["intent"]


def test_completion_is_json_with_the_intent_first_and_slots_in_order(rows):
    for row in rows:
        assert set(row) == {"prompt", "completion", "intent", "template"}
        intent = json.loads(row["completion"])
        assert row["intent"] == intent["intent"]
        first, *slots = intent
        assert first == "intent"
        assert slots == sorted(slots)
        assert row["completion"] == json.dumps(intent)
        assert all(isinstance(value, str | int) for value in intent.values())


def test_prompts_are_short_clean_and_unique(rows):
    prompts = [row["prompt"] for row in rows]
    assert len(set(prompts)) == ROWS
    for prompt in prompts:
        assert len(prompt.split()) <= 14
        assert prompt == " ".join(prompt.split())
        assert not set(prompt) & set("[](){}<>|;:")


def test_hassil_reads_every_prompt_as_labelled(rows, intents):
    for row in rows:
        reading = recognize_best(row["prompt"], intents, slot_lists=make_intents.HOME)
        slots = {entity.name: entity.value for entity in reading.entities_list}
        assert {"intent": reading.intent.name, **slots} == json.loads(row["completion"])


def test_a_slot_value_is_canonical(intents):
    reading = make_intents.read_back("close the blinds in the kitchen", intents)
    expected = {"area": "kitchen", "device_class": "blind", "domain": "cover"}
    assert json.loads(make_intents.label(reading)) == {"intent": "HassTurnOff"} | expected
    reading = make_intents.read_back("set the desk lamp brightness to 40 percent", intents)
    assert '"brightness": 40,' in make_intents.label(reading)


def test_an_ambiguous_or_unknown_prompt_has_no_reading(intents):
    # Either an order to turn them off, or a question whether they are.
    assert make_intents.read_back("all the attic fans off", intents) is None
    assert make_intents.read_back("write a poem about fans", intents) is None


def test_a_wildcard_that_swallows_more_is_no_rival(intents):
    reading = make_intents.read_back("play queen on the tv in the attic", intents)
    assert json.loads(make_intents.label(reading))["name"] == "tv"


def test_another_seed_gives_other_rows():
    first, second = (make_intents.build_rows(40, seed) for seed in (7, 8))
    assert len(first) == len(second) == 40
    assert first != second


def test_more_rows_than_the_templates_give_are_refused(monkeypatch):
    # Six wordings: "cancel the timer", "stop my timer" and the like.
    monkeypatch.setattr(make_intents, "INTENTS", {"HassCancelTimer": "default"})
    assert len(make_intents.build_rows(6, seed=7)) == 6
    with pytest.raises(UserError, match="only 6 of 7 rows"):
        make_intents.build_rows(7, seed=7)


def test_the_command_writes_the_same_rows_whatever_the_hash_seed(rows, tmp_path):
    output = tmp_path / "new" / "intents.jsonl"
    command = [sys.executable, make_intents.__file__, "--output", str(output)]
    command += ["--rows", "450", "--seed", "7"]
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert [json.loads(line) for line in output.read_text("utf-8").splitlines()] == rows
    assert list(output.parent.iterdir()) == [output]
    assert done.stdout.startswith("make_intents: 450 rows, 8 intents, ")
    assert done.stdout.count("\n") == 1
