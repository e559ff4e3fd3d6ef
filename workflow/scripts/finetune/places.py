"""The places that a dataset's rows are read from: files, saved folders, and the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from finetune.cli import UserError, say
from finetune.hub import hub_errors
from finetune.readers import BLOCK_ROWS, Block, read_blocks
from finetune.sources import data_files, file_kind, is_local, is_saved, visible_files
from finetune.splits import SPLITS
from finetune.utf8 import is_utf8

if TYPE_CHECKING:
    import datasets

HELD_OUT = re.compile(r"(test)|(validation|valid|val|dev)")
"""Names of held-out files, without their ending."""
SHARD = re.compile(r"[-_.]?\d+(-of-\d+)?")
"""What follows the name of a file that is one of several, as on the hub: -00000-of-00003."""


@dataclass(frozen=True)
class Place:
    """A file, or one split of a saved or hub dataset."""

    source: dict
    """The entry of the config that it belongs to."""
    name: str
    """What stats.json calls it: the path of its entry, with the split if one is named."""
    blocks: Iterator[Block]
    into: str | None
    """The split that all its rows go to; None where a hash decides."""
    commit: str | None = None
    """Of a hub dataset."""


def open_places(sources: list[dict], sample_by: str) -> list[Place]:
    """All places, those of held-out rows first: a row that stands in train too is then left out
    of train, and one that stands in both of them stays in test."""
    places = [place for source in sources for place in open_source(source, sample_by)]
    order = {"test": 0, "validation": 1}
    return sorted(places, key=lambda place: order.get(place.into, 2))


def open_source(source: dict, sample_by: str) -> Iterator[Place]:
    path, subset = source["path"], source["subset"]
    name = joined(path, subset, source["split"])
    if is_local(path) and not is_saved(path):
        if Path(path).is_dir():
            say_left_out(path)
        for file in checked(data_files(path), path):
            into = source["into"] or (split_in_path(file, path) if Path(path).is_dir() else None)
            yield Place(source, name, read_blocks(Path(file), sample_by), into)
        return
    loaded, commit = (load_saved(path), None) if is_local(path) else load_hub(source)
    for split, rows in chosen_splits(loaded, source).items():
        given = split if split in SPLITS[1:] else None
        blocks = table_blocks(rows, joined(path, subset, split))
        yield Place(source, name, blocks, source["into"] or given, commit)


def split_in_path(file: str, folder: str) -> str | None:
    """A folder that holds test.jsonl, test/ and the like brings its own held-out splits."""
    parts = Path(file).relative_to(folder).parts
    return next(filter(None, map(held_out_by, reversed(parts))), None)


def held_out_by(name: str) -> str | None:
    """`test` for test.csv and for test-00000-of-00002.parquet."""
    stem = name.partition(".")[0].lower()
    if (found := HELD_OUT.match(stem)) is None:
        return None
    rest = stem[found.end() :]
    if rest and not SHARD.fullmatch(rest):  # testimony.csv
        return None
    return "test" if found[1] else "validation"


def joined(*parts: str | None) -> str:
    return "/".join(filter(None, parts))


def checked(files: list[str], path: str) -> list[str]:
    """Refuse what would be read by mistake, or could not be written down."""
    kinds = {file_kind(Path(file)) for file in files}
    if Path(path).is_dir() and "txt" in kinds and len(kinds) > 1:
        raise UserError(
            f"{path} holds .txt files among others. A README would be trained on: name the files, "
            f"e.g. `source: {path.rstrip('/')}/*.{min(kinds - {'txt'})}`"
        )
    for file in files:
        if not is_utf8(os.fsencode(file)):
            raise UserError(f"the file name {file!a} is not UTF-8; rename the file")
    return files


def say_left_out(folder: str) -> None:
    """A file in a form that is not read (.xlsx, .jsonl.zst) is no silent gap."""
    others = sorted(file.name for file in visible_files(Path(folder)) if not file_kind(file))
    if others:
        listed = ", ".join(others[:5]) + ", …" * (len(others) > 5)
        say(f"{folder}: left out, since they are no files of rows: {listed}")


def load_saved(path: str) -> dict[str, datasets.Dataset]:
    """The splits of a folder of `save_to_disk`; "" names that of a dataset without any."""
    from datasets import Dataset, load_from_disk

    loaded = load_from_disk(path)
    return {"": loaded} if isinstance(loaded, Dataset) else loaded


def load_hub(source: dict) -> tuple[datasets.DatasetDict, str | None]:
    """All splits of a hub dataset, and the commit that they were made from."""
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError

    path, subset = source["path"], source["subset"]
    try:
        with hub_errors("dataset", path, source["revision"]):
            builder = load_dataset_builder(path, subset, revision=source["revision"])
            check_commit(builder, path, source["revision"])
            builder.download_and_prepare()
            return builder.as_dataset(), builder.hash  # which is the commit, in the cache too
    except DatasetNotFoundError as error:
        raise UserError(
            f"the hub does not give {path!r}: {error} Check the spelling and `revision`, or run "
            "`hf auth login`."
        ) from None
    except UserError:
        raise
    except ValueError as error:  # no such configuration, or one has to be named
        raise UserError(f"{path} with subset {subset!r}: {error}") from None


def check_commit(builder: datasets.DatasetBuilder, path: str, revision: str | None) -> None:
    """Where `datasets` cannot ask the hub it takes the newest commit in its cache, whatever
    revision is wanted."""
    from datasets.packaged_modules.cache.cache import Cache

    if not isinstance(builder, Cache) or builder.hash == revision:
        return
    if revision is not None:
        raise UserError(
            f"{path} comes from the cache, not from the hub, and the newest commit there, "
            f"{builder.hash}, may not be revision {revision!r}. Run once on a host with a network, "
            f"or set `revision: {builder.hash}`."
        )
    say(f"{path} comes from the cache, not from the hub: commit {builder.hash}")


def chosen_splits(loaded: dict[str, datasets.Dataset], source: dict) -> dict:
    """The split that the source names, or those that are called like ours."""
    path, wanted, known = source["path"], source["split"], ", ".join(loaded)
    if wanted is not None:
        if wanted not in loaded:
            raise UserError(f"{path} has no split {wanted!r}, only: {known or 'rows without one'}")
        return {wanted: loaded[wanted]}
    if set(loaded) == {""}:
        return loaded
    if "train" not in loaded:
        raise UserError(
            f"{path} has no train split, only: {known}. Name one and where it goes: "
            f"`source: {{path: {path}, split: {next(iter(loaded))}, into: train}}`"
        )
    if others := [split for split in loaded if split not in SPLITS]:
        say(f"{path} has other splits, which are left out: {', '.join(others)}")
    return {split: loaded[split] for split in SPLITS if split in loaded}


def table_blocks(rows: datasets.Dataset, place: str) -> Iterator[Block]:
    """Arrow tables of some rows each, in which classes have their names."""
    start = 1
    for table in rows.with_format("arrow").iter(BLOCK_ROWS):
        yield Block(place, start, with_class_names(table, rows.features))
        start += len(table)


def with_class_names(table: pa.Table, features: dict) -> pa.Table:
    """ClassLabel columns hold numbers; their names are what people know."""
    from datasets import ClassLabel

    for place, (name, feature) in enumerate(features.items()):
        if isinstance(feature, ClassLabel):
            ids = table[name].to_pylist()
            names = [None if i is None or i < 0 else feature.names[i] for i in ids]
            table = table.set_column(place, name, pa.array(names, pa.string()))
    return table
