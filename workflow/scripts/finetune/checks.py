"""Gates of the data check: what tokens must be like before a GPU is asked for.

Pure: `lint.json` and the limits of config.Checks in, one line per failing gate out. Each line
says what is wrong with figures, which key sets the limit, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

CAUSAL = "causal-lm"


@dataclass(frozen=True)
class Gate:
    """A share of what was counted, against the limit of its key in config.Checks."""

    key: str
    """`min_…` or `max_…`: that says which side of the limit fails."""
    counts: Callable[[dict], tuple[int, int]]
    """The part and the whole. A whole of 0 has no share, and passes."""
    wrong: str
    """What follows the share. Like `cure` it may name keys of `facts`."""
    cure: str
    task: str | None = None
    """The only task it is for. None: all."""


GATES = (
    Gate(
        "min_supervised",
        lambda lint: (lint["train"]["supervised_tokens"], lint["train"]["tokens"]),
        "of {whole} training tokens are trained on",
        "Look at the samples: if answers are not marked, change train_on (now {train_on}); if "
        "they are short beside their prompts, lower the limit.",
        CAUSAL,
    ),
    Gate(
        "min_ended",
        lambda lint: (lint["train"]["ended"], lint["train"]["endings"]),
        "of {whole} training examples, not counting those cut at the end, end a turn with their "
        "last supervised token",
        "The model would not learn to stop. Take a chat_template that writes an end marker after "
        "every answer, such as chatml.",
        CAUSAL,
    ),
    Gate(
        "max_dropped",
        lambda lint: (sum(lint["train"]["dropped"].values()), lint["train"]["rows"]),
        "of {whole} training rows were left out: {causes}",
        "{cures}",
    ),
    Gate(
        "max_truncated",
        lambda lint: (lint["train"]["truncated"], lint["train"]["rows"]),
        "of {whole} training rows were cut to max_length {max_length}",
        "Raise max_length{beyond}, or raise the limit if what is cut does not matter.",
    ),
    Gate(
        "max_control_tokens",
        lambda lint: (lint["train"]["control_tokens"], lint["train"]["rows"]),
        "of {whole} training rows hold a control token of the model in their own text",
        "The model would take it for the end of a turn or the like. Clean the rows, or raise the "
        "limit if it belongs there.",
    ),
    Gate(
        "max_overlap",
        lambda lint: (lint["prepared"]["overlap"], lint["prepared"]["rows"]["test"]),
        "of {whole} test rows have a prompt that is trained on too",
        "Scores would count what was memorized. Set split.group to a column that such rows share, "
        "or take them out of one of the sources.",
    ),
)


def failed_checks(lint: dict, checks: dict) -> list[str]:
    """One line for each gate that fails. None: the data can be trained on."""
    if lint["train"]["sequences"] == 0:  # no other figure of the split means anything
        return [nothing_left(lint)]
    lines = (check(gate, lint, checks[gate.key]) for gate in GATES)
    return [line for line in lines if line]


def notices(lint: dict) -> list[str]:
    """What passes, but has to be chosen: one line each."""
    count = lint["train"]["empty_thoughts"]
    if count == 0 or "enable_thinking" in lint["settings"]["template_options"]:
        return []
    return [
        f"{count:,} training answers begin with an empty thought of the chat template's, which "
        "their prompts do not hold: the model learns to write it, and thinks no more. Set "
        "template_options: {enable_thinking: false} under the model to put it into the prompts "
        "(evaluate and serve it so too; thinking stays as it was), or true if that is meant."
    ]


def check(gate: Gate, lint: dict, limit: float) -> str | None:
    """The line, if the gate fails. A share that equals the limit passes."""
    part, whole = gate.counts(lint)
    if whole == 0 or gate.task not in (None, lint["task"]):
        return None
    share, least = part / whole, gate.key.startswith("min_")
    if (share >= limit) if least else (share <= limit):
        return None
    asks = "asks for at least" if least else "allows"
    text = (
        f"{percent(share, limit)} {gate.wrong} (checks.{gate.key} {asks} {100 * limit:.10g}%). "
        f"{gate.cure}"
    )
    return text.format(whole=f"{whole:,}", **facts(lint))


def percent(share: float, *others: float) -> str:
    """With one decimal, or as many as tell it from 0, from 1 and from `others`."""
    for digits in range(1, 12):
        shown = f"{share:.{digits}%}"
        if shown not in {f"{other:.{digits}%}" for other in {0, 1, *others} - {share}}:
            break
    return shown


def nothing_left(lint: dict) -> str:
    """Why there is no training row at all."""
    rows, words = lint["train"]["rows"], facts(lint)
    if rows == 0:
        return (
            "The training split has no rows. Lower split.validation and split.test, or check "
            "`into` of the sources."
        )
    return f"None of {rows:,} training rows is left: {words['causes']}. {words['cures']}"


def facts(lint: dict) -> dict:
    """What the lines of the gates may name: the settings, and why rows were left out."""
    p99, settings = lint["train"]["quantiles"]["p99"], lint["settings"]
    past = f" (p99 is {p99:,} tokens)" if p99 > settings["max_length"] else ""
    reasons = {key: REASONS[key] for key, rows in lint["train"]["dropped"].items() if rows}
    words = settings | {"beyond": past} | lint["train"]["dropped"]
    return words | {
        "causes": ", ".join(why.format(**words) for why, _ in reasons.values()),
        "cures": " ".join(cure.format(**words) for _, cure in reasons.values()),
    }


REASONS = {
    "too_long": (
        "{too_long:,} are longer than max_length {max_length}",
        "Raise max_length{beyond}, or set truncate: end.",
    ),
    "unsupervised": (
        "{unsupervised:,} hold nothing that is trained on",
        "Rows need an answer that train_on (now {train_on}) covers and truncate (now {truncate}) "
        "leaves in.",
    ),
}
"""Keys of `dropped`: the cause and the cure."""
