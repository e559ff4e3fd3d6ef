"""The formats that rows come in, and how one is told from the columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from finetune.cli import UserError
from finetune.conversations import (
    Turn,
    alpaca_turns,
    check_turns,
    listed_turns,
    pair_turns,
    tool_list,
    with_system_column,
)
from finetune.values import label, text

NEEDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt-completion": ("prompt", "completion"),
    "text-label": ("text", "label"),
    "text": ("text",),
}
"""The columns that each format needs, by our names."""
SYNONYMS = {
    "messages": ("chat", "dialogue", "dialog", "turns"),
    "conversations": ("conversation",),
    "prompt": ("question", "query", "input", "user", "instruction", "source"),
    "completion": ("answer", "response", "output", "assistant", "reply", "target"),
    "text": ("content", "sentence", "document", "body", "review"),
    "label": ("labels", "class", "category", "target", "intent", "sentiment"),
}
"""Other names for our columns, to propose a `columns:` line and no more."""
Get = Callable[[str], Any]
"""The cell of a row by our name of its column; None where the row has none."""


def find_format(
    rows: Iterable[dict], place: str, columns: dict[str, str], said: str | None = None
) -> str:
    """The format that most of the first rows have, or the one `said` if any row has its columns.
    `columns` maps our names to the user's."""
    votes: Counter[str] = Counter()
    found: dict[str, None] = {}
    for row in rows:
        votes.update([said] if said and has_needs(row, said, columns) else [])
        votes.update([] if said else fitting(row, columns))
        found |= dict.fromkeys(row)
    best = [name for name in NEEDS if votes[name] == max(votes.values(), default=0)]
    if not votes:
        raise UserError(no_format(place, list(found), columns, [said] if said else list(NEEDS)))
    if len(best) > 1:
        lines = " or ".join(f"`format: {name}`" for name in best)
        raise UserError(
            f"{place} fits {' and '.join(best)} (columns: {', '.join(found)}). Set {lines} under "
            "the dataset."
        )
    return best[0]


def fitting(row: dict, columns: dict[str, str]) -> list[str]:
    """The formats whose columns a row has. A label makes text a text-label row."""
    names = [name for name in NEEDS if has_needs(row, name, columns)]
    return [n for n in names if not (n == "text" and "text-label" in names)]


def has_needs(row: dict, format: str, columns: dict[str, str]) -> bool:
    return all(columns.get(name, name) in row for name in NEEDS[format])


def no_format(place: str, found: list[str], columns: dict[str, str], formats: list[str]) -> str:
    """What was found, what is needed, and the line to write if the names are well known."""
    wanted = (" and ".join(f"`{columns.get(c, c)}`" for c in NEEDS[name]) for name in formats)
    line = next(filter(None, (mapping(NEEDS[name], found) for name in formats)), None)
    line = line or "columns: {prompt: your question column, completion: your answer column}"
    return (
        f"{place} has the columns: {', '.join(found) or 'none'}. Needed: {', or '.join(wanted)}. "
        f"Map yours under the dataset, e.g. `{line}`."
    )


def mapping(needs: tuple[str, ...], found: list[str]) -> str | None:
    """A `columns:` line for one format, where every column has a likely counterpart."""
    lower = {name.lower(): name for name in found}
    pairs = {}
    for ours in needs:
        likely = (n for n in (ours, *SYNONYMS.get(ours, ())) if n in lower)
        if (name := next(likely, None)) is None:
            return None
        pairs[ours] = lower[name]
    listed = ", ".join(f"{ours}: {name}" for ours, name in pairs.items())
    return f"columns: {{{listed}}}"


def canonical(row: dict, format: str, columns: dict[str, str]) -> dict:
    """`messages`, `tools`, `text` and `label` of a row, each None where the format has none.

    Raises RowError.
    """

    def get(name: str) -> Any:
        return row.get(columns.get(name, name))

    out: dict[str, Any] = dict.fromkeys(("messages", "tools", "text", "label"))
    if format in TURNS:
        turns = with_system_column(TURNS[format](get), get("system"))
        check_turns(turns)
        return out | {"messages": turns, "tools": tool_list(get("tools"))}
    out["text"] = text(get("text"), "text")
    if format == "text-label":
        out["label"] = label(get("label"))
    return out


TURNS: dict[str, Callable[[Get], list[Turn]]] = {
    "messages": lambda get: listed_turns(get("messages"), "messages"),
    "sharegpt": lambda get: listed_turns(get("conversations"), "conversations"),
    "alpaca": alpaca_turns,
    "prompt-completion": pair_turns,
}
