"""The one shape that prepared rows have, and how a block of raw rows comes into it.

A prepared row has `id` (place:line) and either `messages` (with the `tools` that they may call),
or `text`, or `text` and `label`. A row that cannot be used is a Reject with its place and reason,
never a silent gap.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from finetune.formats import canonical
from finetune.json_text import RowError
from finetune.readers import Block
from finetune.splits import choose_split, position

TURN = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("train", pa.bool_()),
        ("extra", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("messages", pa.list_(TURN)),
        ("tools", pa.string()),
        ("text", pa.string()),
        ("label", pa.string()),
    ]
)


ENCODER = json.JSONEncoder(ensure_ascii=False)
"""`json.dumps` would make one for each row."""


@dataclass(frozen=True)
class Reject:
    """A row that cannot be used."""

    source: str
    line: int
    reason: str

    def as_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True)
class Recipe:
    """How the rows of a place are read and split. It is sent to other processes."""

    format: str
    columns: dict[str, str]
    split: dict[str, Any]
    """The section of the config, with a share of 0 for splits that a source brings."""
    into: str | None


@dataclass
class Prepared:
    """What became of a block. All lists but `rejects` have one entry per usable row."""

    rows: pa.RecordBatch | None = None
    lines: list[int] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    """Digest of all that a row holds: rows of equal content are duplicates."""
    prompts: list[int] = field(default_factory=list)
    """Digest of what is asked, in lower case and without spaces."""
    splits: list[str] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    """User's columns that no row had."""


def prepare_block(task: tuple[Block, Recipe]) -> Prepared:
    """Usable rows in the shape of SCHEMA, and the rejects."""
    block, recipe = task
    done, rows = Prepared(missing=set(recipe.columns.values())), []
    for number, raw in block.rows():
        try:
            if isinstance(raw, RowError):
                raise raw
            if done.missing:
                done.missing = {column for column in done.missing if column not in raw}
            row = canonical(raw, recipe.format, recipe.columns)
            content = ENCODER.encode(row)
            split = recipe.into or split_of(raw, content, recipe.split)
        except RowError as error:
            done.rejects.append(Reject(block.place, number, str(error)))
            continue
        rows.append({"id": f"{block.place}:{number}", **row})
        done.lines.append(number)
        done.contents.append(hashlib.blake2b(content.encode(), digest_size=16).digest())
        done.prompts.append(prompt_digest(row))
        done.splits.append(split)
    done.rows = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    return done


def split_of(raw: dict, content: str, split: dict[str, Any]) -> str:
    """By the row's group, or by its own content where it has none."""
    key = content
    if split["group"] is not None:
        if split["group"] not in raw:
            raise RowError(f"no column {split['group']!r}, which split.group names")
        group = raw[split["group"]]
        if group not in (None, "") and group == group:  # a CSV file has "", a data frame NaN
            key = f"group {group}"
    return choose_split(key, split["seed"], split["validation"], split["test"])


def prompt_digest(row: dict) -> int:
    """64 bits of the text before the last turn, or of the whole text."""
    turns = row["messages"]
    text = " ".join(turn["content"] for turn in turns[:-1]) if turns else row["text"]
    plain = "".join(text.casefold().split())
    digest = hashlib.blake2b(plain.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def copies(content: bytes, weight: float) -> int:
    """How often a training row with this content digest is taken: `weight` on average."""
    return int(weight) + (position(content) < weight % 1)
