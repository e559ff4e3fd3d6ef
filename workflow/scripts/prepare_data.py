"""Rule prepare_data: from source files to train, validation and test rows in one shape.

Reads JSONL, CSV, Parquet or a hub dataset. Writes one parquet file per split (`id`,
`messages`), `rejects.jsonl` with the place and reason of every row left out, and `stats.json`
with counts and the digests of local files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from finetune.cli import UserError, read_settings, run_script, say
from finetune.files import digest_file, write_aside, write_json
from finetune.hub import hub_errors
from finetune.records import Reject, RowError, find_format, read_rows, to_messages
from finetune.sources import is_local
from finetune.splits import SPLITS, choose_split

TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
SCHEMA = pa.schema([("id", pa.string()), ("messages", pa.list_(TURN))])
ROWS_PER_WRITE = 10_000
OUTPUTS = (*(f"{split}.parquet" for split in SPLITS), "rejects.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", required=True, type=read_settings)
    parser.add_argument("--output", required=True, type=Path, help="folder")
    args = parser.parse_args()

    with ExitStack() as stack:
        aside = {name: stack.enter_context(write_aside(args.output / name)) for name in OUTPUTS}
        counts = write_splits(args.settings, aside)
    digests = {s: digest_file(s) for s in args.settings["source"] if is_local(s)}
    stats = {**counts, "sources": digests, "settings": args.settings}
    write_json(args.output / "stats.json", stats)
    rows = ", ".join(f"{counts['rows'][split]} {split}" for split in SPLITS)
    left_out = f"{counts['duplicates']} duplicates, {sum(counts['rejected'].values())} rejected"
    say(f"prepare_data: {rows} rows; left out: {left_out}")


def write_splits(settings: dict, aside: dict[str, Path]) -> dict:
    """Stream all rows into their splits. Returns what was counted."""
    rows, rejected, seen, duplicates = Counter(), Counter(), set(), 0
    examples: dict[str, str] = {}
    with ExitStack() as stack:
        rejects = stack.enter_context(open(aside["rejects.jsonl"], "w", encoding="utf-8"))
        writers = {s: stack.enter_context(SplitWriter(aside[f"{s}.parquet"])) for s in SPLITS}
        for row in canonical_rows(settings):
            if isinstance(row, Reject):
                rejects.write(row.as_json() + "\n")
                rejected[row.reason] += 1
                examples.setdefault(row.reason, f"{row.source}:{row.line}")
            elif (digest := hashlib.sha256(row["key"].encode()).digest()) in seen:
                duplicates += 1
            else:
                seen.add(digest)
                rows[row["split"]] += 1
                writers[row["split"]].add(row)
    check_rejects(settings["max_rejects"], rows.total() + duplicates, rejected, examples)
    check_splits(settings["split"], rows)
    return {
        "rows": {split: rows[split] for split in SPLITS},
        "duplicates": duplicates,
        "rejected": dict(rejected.most_common()),
    }


class SplitWriter:
    """Writes canonical rows to one parquet file, some thousands at a time."""

    def __init__(self, path: Path) -> None:
        self.file = pq.ParquetWriter(path, SCHEMA)
        self.rows: list[dict] = []

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self.file.close()

    def add(self, row: dict) -> None:
        self.rows.append({"id": row["id"], "messages": row["messages"]})
        if len(self.rows) == ROWS_PER_WRITE:
            self.flush()

    def flush(self) -> None:
        self.file.write_table(pa.Table.from_pylist(self.rows, schema=SCHEMA))
        self.rows = []


def canonical_rows(settings: dict) -> Iterator[dict | Reject]:
    """Rows with id, messages, key (their text) and split."""
    columns, split, formats = settings["columns"], settings["split"], {}
    for source, open_splits, number, row in raw_rows(settings):
        try:
            if isinstance(row, RowError):
                raise row
            if source not in formats:
                formats[source] = settings["format"] or find_format(row, source, columns)
            messages = to_messages(row, formats[source], columns)
            key = json.dumps(messages, sort_keys=True, ensure_ascii=False)
            group = group_of(row, split["group"], f"{source}:{number}") or key
        except RowError as error:
            yield Reject(source, number, str(error))
            continue
        shares = {name: split[name] if name in open_splits else 0 for name in SPLITS[1:]}
        where = open_splits[0] if len(open_splits) == 1 else None
        where = where or choose_split(group, split["seed"], **shares)
        yield {"id": f"{source}:{number}", "messages": messages, "key": key, "split": where}


def group_of(row: dict, column: str | None, place: str) -> str | None:
    if column is None:
        return None
    if column not in row:
        raise UserError(f"{place}: split.group names {column!r}, but columns are {', '.join(row)}")
    return f"group {row[column]}"


def raw_rows(settings: dict) -> Iterator[tuple[str, tuple, int, dict | RowError]]:
    """(source, splits the row may go to, line number, row)."""
    for source in settings["source"]:
        if is_local(source):
            for number, row in read_rows(Path(source)):
                yield source, SPLITS, number, row
        else:
            yield from hub_rows(source, settings["subset"], settings["revision"])


def hub_rows(
    source: str, subset: str | None, revision: str | None
) -> Iterator[tuple[str, tuple, int, dict]]:
    """Rows of a hub dataset. Validation and test splits that it has stay what they are.

    They come before train, so that a row which stands in both is left out of train.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    with hub_errors("dataset", source, revision):
        try:
            loaded = load_dataset(source, subset, revision=revision)
        except DatasetNotFoundError as error:
            raise UserError(
                f"the hub has no dataset {source!r} that you may read: {error}"
            ) from None
    given = [split for split in SPLITS if split in loaded]
    if "train" not in given:
        raise UserError(f"{source} has no train split, only: {', '.join(loaded)}")
    missing = tuple(split for split in SPLITS if split == "train" or split not in given)
    if others := [split for split in loaded if split not in SPLITS]:
        say(f"prepare_data: {source} has other splits, which are left out: {', '.join(others)}")
    for split in reversed(given):
        for number, row in enumerate(loaded[split], start=1):
            yield f"{source}/{split}", missing if split == "train" else (split,), number, row


def check_rejects(limit: float, good: int, rejected: Counter, examples: dict[str, str]) -> None:
    """Stop when more rows are unreadable than the user allows."""
    bad = rejected.total()
    if bad == 0 or bad <= limit * (good + bad):
        return
    common = "; ".join(f"{n} x {r} (e.g. {examples[r]})" for r, n in rejected.most_common(3))
    raise UserError(
        f"{bad} of {good + bad} rows cannot be used, more than max_rejects {limit:.2%} allows: "
        f"{common}. Mend them, or raise max_rejects under the dataset to leave them out."
    )


def check_splits(split: dict, rows: Counter) -> None:
    """An empty split where rows were asked for is found now, not after training."""
    for name in SPLITS:
        if rows[name] == 0 and split.get(name, 1) > 0:
            none = " (validation: 0 if you want none)" if name == "validation" else ""
            cure = f"or a larger share{none}"
            raise UserError(
                f"the {name} split is empty ({rows.total()} rows in all). Give more rows, another "
                f"split.seed, {cure if name in split else 'or smaller shares to the others'}."
            )


if __name__ == "__main__":
    run_script(main)
