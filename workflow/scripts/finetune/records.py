"""Rows as people have them, read one by one, turned into one canonical shape.

Canonical row: `id` (file:line), `messages` (list of {role, content}). A row that cannot be
used is a Reject with its place and reason, never a silent gap. Lines are read here and not by
`datasets`: Arrow's type inference turns strings to null depending on the order of rows
(huggingface/datasets issue 7222), and it keeps no line numbers.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.cli import UserError

FORMATS = {"messages": ("messages",), "prompt-completion": ("prompt", "completion")}
"""The columns each format needs, by our names."""


@dataclass(frozen=True)
class Reject:
    """A row that cannot be used."""

    source: str
    line: int
    reason: str

    def as_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


class RowError(ValueError):
    """Why one row cannot be used."""


def read_rows(path: Path) -> Iterator[tuple[int, dict | RowError]]:
    """(line or row number from 1, row) of a JSONL, CSV or Parquet file."""
    readers = {".jsonl": read_jsonl, ".csv": read_csv, ".parquet": read_parquet}
    if path.suffix not in readers:
        raise UserError(f"{path}: cannot read {path.suffix!r} files; known: {', '.join(readers)}")
    return readers[path.suffix](path)


def read_jsonl(path: Path) -> Iterator[tuple[int, dict | RowError]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, parse_json(line)


def parse_json(line: bytes) -> dict | RowError:
    try:
        row = load_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return RowError("not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8")
    except RowError as error:
        return error
    return row if isinstance(row, dict) else RowError("not a JSON object")


def load_json(text: str) -> Any:
    """Raises RowError for broken JSON, and for what Python will not read (too deep, too long)."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RowError:
        raise
    except (ValueError, RecursionError) as error:
        raise RowError(f"not JSON: {getattr(error, 'msg', error)}") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise RowError("a key appears twice")
    return row


def read_csv(path: Path) -> Iterator[tuple[int, dict | RowError]]:
    csv.field_size_limit(sys.maxsize)  # else a text of 131,073 letters is "not CSV"
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield from csv_rows(path, csv.reader(file, strict=True))
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8; convert it, e.g. iconv -f latin1 -t utf-8") from None


def csv_rows(path: Path, reader: Any) -> Iterator[tuple[int, dict | RowError]]:
    """Rows with the line they start on: a quoted field may hold line breaks."""
    line = 1
    try:
        header = next(filter(None, reader), [])
        if len(set(header)) < len(header):
            raise UserError(f"{path}: a column appears twice in the header: {', '.join(header)}")
        line = reader.line_num + 1
        for fields in reader:
            if len(fields) == len(header):
                yield line, dict(zip(header, fields, strict=True))
            elif fields:  # else it is an empty line
                yield line, RowError("another number of fields than the header")
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{line}: not CSV: {error}") from None


def read_parquet(path: Path) -> Iterator[tuple[int, dict | RowError]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not Parquet: {error}") from None
    number = 0
    for batch in file.iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield number, row


def find_format(row: dict, source: str, columns: dict[str, str]) -> str:
    """The format whose columns the row has. `columns` maps our names to the user's."""
    named = {columns.get(ours, ours): ours for names in FORMATS.values() for ours in names}
    present = {named[key] for key in row if key in named}
    fitting = [name for name, needs in FORMATS.items() if set(needs) <= present]
    if len(fitting) == 1:
        return fitting[0]
    found = ", ".join(row)
    if fitting:
        raise UserError(f"{source} fits {' and '.join(fitting)} (columns: {found}); set `format`.")
    wanted = (" and ".join(f"`{columns.get(n, n)}`" for n in names) for names in FORMATS.values())
    raise UserError(
        f"{source} has the columns: {found}. Needed: {', or '.join(wanted)}. "
        "Map yours under the dataset, e.g. `columns: {prompt: question, completion: answer}`."
    )


def to_messages(row: dict, format: str, columns: dict[str, str]) -> list[dict[str, str]]:
    """The conversation in a row. Raises RowError."""
    values = [row.get(columns.get(name, name)) for name in FORMATS[format]]
    if format == "messages":
        messages = [clean_turn(turn) for turn in as_turns(values[0])]
    else:
        roles = ("user", "assistant")
        pairs = zip(roles, values, FORMATS[format], strict=True)
        messages = [{"role": r, "content": text(v, name)} for r, v, name in pairs]
    check_order([m["role"] for m in messages])
    return messages


def as_turns(value: Any) -> list:
    if isinstance(value, str):  # CSV can hold messages only as JSON text
        try:
            value = load_json(value)
        except RowError as error:
            raise RowError(f"messages is text, but {error}") from None
    if not isinstance(value, list) or not value:
        raise RowError("messages is not a list of turns, or is empty")
    return value


def clean_turn(turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict) or turn.get("role") not in ("system", "user", "assistant"):
        raise RowError("a turn needs a role: system, user or assistant")
    return {"role": turn["role"], "content": text(turn.get("content"), f"{turn['role']} content")}


def text(value: Any, name: str) -> str:
    if value is None:
        raise RowError(f"{name} is missing")
    if not isinstance(value, str):
        raise RowError(f"{name} is {type(value).__name__}, not text")
    if not value.strip():
        raise RowError(f"{name} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(f"{name} holds a lone surrogate, which is no text") from None
    return value


def check_order(roles: list[str]) -> None:
    """[system] (user assistant)+: what chat templates accept and training can learn from."""
    turns = roles[1:] if roles[0] == "system" else roles
    expected = ["user", "assistant"] * (len(turns) // 2)
    if not turns or turns != expected:
        raise RowError("turns must go [system] user assistant user assistant …, assistant last")
