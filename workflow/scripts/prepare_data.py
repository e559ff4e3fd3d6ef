"""Rule prepare_data: from whatever people have to train, validation and test rows in one shape.

Reads files, folders and hub datasets. Writes one parquet file per split (finetune.records.SCHEMA),
`rejects.jsonl` with the place and reason of every row left out, and `stats.json`: counts, also by
source, overlap of test and train, digests of local files and commits of hub datasets.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from finetune.cli import UserError, read_settings, run_script, say, speak_for
from finetune.files import digest_file, write_aside, write_json
from finetune.formats import find_format
from finetune.parallel import in_order
from finetune.places import Place, open_places
from finetune.readers import Block
from finetune.records import SCHEMA, Prepared, Recipe, copies, prepare_block
from finetune.sources import data_inputs
from finetune.splits import SPLITS
from finetune.tally import Tally

ROWS_PER_GROUP = 10_000
LOOKED_AT = 100
"""Rows from which the format of a place is told; ten times as many, if some are broken."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", required=True, type=read_settings)
    parser.add_argument("--output", required=True, type=Path, help="folder")
    parser.add_argument("--rejects", required=True, type=Path, help="rejects.jsonl")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    speak_for(args.output.name)
    settings, tally = args.settings, Tally()
    found = stamps(settings["source"])
    places = open_places(settings["source"], settings["sample_by"])
    with ExitStack() as stack:
        aside = {s: stack.enter_context(write_aside(args.output / f"{s}.parquet")) for s in SPLITS}
        writers = {s: stack.enter_context(SplitWriter(path)) for s, path in aside.items()}
        rejects = stack.enter_context(open(args.rejects, "w", encoding="utf-8"))
        Preparation(settings, tally, writers, rejects).read(places, args.threads)
        tally.check_rejects(settings["max_rejects"])
        tally.check_splits(settings["split"])
    check_unchanged(found, stamps(settings["source"]))
    origin = {"sources": digests(settings["source"]), "commits": commits(places)}
    write_json(args.output / "stats.json", tally.stats() | origin | {"settings": settings})
    say(summary(tally))


class SplitWriter:
    """Writes rows to one parquet file, in groups of some thousand: what one process tokenizes."""

    def __init__(self, path: Path) -> None:
        self.file = pq.ParquetWriter(path, SCHEMA)
        self.batches: list[pa.RecordBatch] = []

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self.file.close()

    def add(self, rows: pa.RecordBatch) -> None:
        self.batches.append(rows)
        if sum(map(len, self.batches)) >= ROWS_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        if self.batches:
            self.file.write_table(pa.Table.from_batches(self.batches, SCHEMA))
        self.batches = []


class Preparation:
    """Streams rows into their splits; what is left out is counted and written down."""

    def __init__(
        self, settings: dict, tally: Tally, writers: dict[str, SplitWriter], rejects: TextIO
    ) -> None:
        self.settings, self.tally, self.writers, self.rejects = settings, tally, writers, rejects
        self.seen: set[bytes] = set()
        self.taken: Counter[tuple] = Counter()
        """Usable rows by `limited_by`."""
        self.formats: dict[str, str] = {}
        self.missing = set(settings["columns"].values())
        """User's columns that no row had so far."""

    def read(self, places: list[Place], threads: int) -> None:
        under_way: deque[Place] = deque()
        for done in in_order(prepare_block, self.tasks(places, under_way), threads):
            self.take(under_way.popleft(), done)
        if self.missing:
            raise UserError(
                f"`columns` names {', '.join(sorted(self.missing))}, and no row that was read has "
                "such a column"
            )

    def tasks(self, places: list[Place], under_way: deque[Place]) -> Iterator[tuple[Block, Recipe]]:
        """What is to be done, place by place; `under_way` gets the place of each."""
        given = {place.into for place in places}
        for place in places:
            self.tally.sources[place.name].update(rows=0)  # a source without rows is listed too
            if self.room(place) == 0:
                continue
            looked_at, rows = look(place.blocks)
            recipe = self.recipe(place, looked_at, rows, given)
            for block in chain(looked_at, place.blocks):
                if self.room(place) == 0:
                    break
                under_way.append(place)
                yield block, recipe

    def recipe(
        self, place: Place, looked_at: list[Block], rows: list[dict], given: set[str | None]
    ) -> Recipe:
        """How to read a place. Where a source brings a split, no other row goes there."""
        settings, found = self.settings, self.settings["format"] or "messages"
        if rows:
            name = looked_at[0].place
            found = find_format(rows, name, settings["columns"], settings["format"])
            self.formats[found] = name
        if "text-label" in self.formats and len(self.formats) > 1:
            listed = "; ".join(f"{place}: {name}" for name, place in self.formats.items())
            raise UserError(f"labelled rows and others make no data set together: {listed}")
        shares = {split: 0 for split in SPLITS[1:] if split in given}
        return Recipe(found, settings["columns"], settings["split"] | shares, place.into)

    def room(self, place: Place) -> float:
        """How many rows may still be taken under the limit that a place has."""
        limit = place.source["rows"]
        return float("inf") if limit is None else limit - self.taken[limited_by(place)]

    def take(self, place: Place, done: Prepared) -> None:
        """Count a block, and write what is new in it. What comes after the limit of its source is
        not even looked at, however large blocks are."""
        if (room := self.room(place)) == 0:
            return
        self.missing &= done.missing
        usable = int(min(len(done.contents), room))
        end = done.lines[usable - 1] if usable == room else float("inf")
        for reject in (reject for reject in done.rejects if reject.line < end):
            self.rejects.write(reject.as_json() + "\n")
            self.tally.reject(place.name, reject)
        self.taken[limited_by(place)] += usable
        self.tally.sources[place.name]["rows"] += usable
        self.write(done, self.chosen(place, done, usable))

    def chosen(self, place: Place, done: Prepared, usable: int) -> dict[str, list[int]]:
        """By split, the rows that are new, as often as their source's weight says."""
        counts = self.tally.sources[place.name]
        chosen: dict[str, list[int]] = {split: [] for split in SPLITS}
        for index in range(usable):
            content, split = done.contents[index], done.splits[index]
            if content in self.seen:
                counts["duplicates"] += 1
                continue
            self.seen.add(content)
            times = copies(content, place.source["weight"]) if split == "train" else 1
            counts["weighed_out"] += times == 0
            chosen[split] += [index] * times
        return chosen

    def write(self, done: Prepared, chosen: dict[str, list[int]]) -> None:
        for split, indices in chosen.items():
            if indices:
                self.writers[split].add(done.rows.take(pa.array(indices)))
                self.tally.write(split, [done.prompts[index] for index in indices])


def limited_by(place: Place) -> tuple:
    """`rows` of a source holds for all its files together, and for each split that it brings."""
    return id(place.source), place.into


def look(blocks: Iterator[Block]) -> tuple[list[Block], list[dict]]:
    """The first blocks, and the first rows in them that can be read."""
    looked_at, rows, seen = [], [], 0
    for block in blocks:
        looked_at.append(block)
        for _, row in block.rows():
            seen += 1
            rows += [row] if isinstance(row, dict) else []
            if len(rows) == LOOKED_AT or seen == 10 * LOOKED_AT:
                return looked_at, rows
    return looked_at, rows


def stamps(sources: list[dict]) -> dict[str, tuple[int, int]]:
    """Size and date of the local files that are there."""
    files = data_inputs(source["path"] for source in sources)
    states = {file: os.stat(file) for file in files if os.path.isfile(file)}
    return {file: (state.st_size, state.st_mtime_ns) for file, state in states.items()}


def check_unchanged(before: dict, after: dict) -> None:
    """Snakemake compares dates with the end of this job: it would never notice."""
    if changed := [file for file in before | after if before.get(file) != after.get(file)]:
        raise UserError(
            f"{', '.join(changed[:3])} changed while the rows were read. Run again when nothing "
            "writes there any more."
        )


def digests(sources: list[dict]) -> dict[str, str]:
    """SHA-256 of the local files."""
    return {file: digest_file(file) for file in data_inputs(source["path"] for source in sources)}


def commits(places: Iterable[Place]) -> dict[str, str]:
    """Of the hub datasets."""
    found = ((place.source["path"], place.source["revision"], place.commit) for place in places)
    return {f"{path}@{revision}" if revision else path: c for path, revision, c in found if c}


def summary(tally: Tally) -> str:
    rows = ", ".join(f"{tally.rows[split]} {split}" for split in SPLITS)
    left_out = [f"{tally.total('duplicates')} duplicates", f"{tally.total('rejected')} rejected"]
    if weighed := tally.total("weighed_out"):
        left_out.append(f"{weighed} by weight")
    return f"{rows} rows; left out: {', '.join(left_out)}"


if __name__ == "__main__":
    run_script(main)
