"""Rule tokenize_data: prepared rows to token ids and labels, for one model's tokenizer.

Reads the split parquet files, the model folder, and model.json beside it. Writes one Arrow folder
per split (finetune.tokens), which training opens read-only, and `lint.json`: counts, lengths, what
was dropped or cut, and decoded samples.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoConfig, PreTrainedTokenizerBase

from finetune.cli import UserError, read_settings, run_script, say, speak_for
from finetune.examples import Encoder
from finetune.files import complete_directory, read_json, write_json
from finetune.lint import SAMPLES, Counts, describe, sample, sample_rows
from finetune.pack_split import pack_split
from finetune.parallel import in_order
from finetune.splits import SPLITS
from finetune.tokenizer import load_tokenizer
from finetune.tokens import CLASSES, TOKENS, open_tokens

BATCH, BATCH_BYTES = 1_000, 4_000_000
"""Rows encoded at once, or fewer if they are long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", required=True, type=read_settings)
    parser.add_argument("--data", required=True, type=Path, help="folder of prepare_data")
    parser.add_argument("--model", required=True, type=Path, help="pretrained/ of fetch_model")
    parser.add_argument("--output", required=True, type=Path, help="folder")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    speak_for(f"{args.output.parent.name} for {args.output.name}")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are processes enough

    classes = class_names(args.data)
    if classes is None:
        check_writes(read_json(args.model.parent / "model.json"))
    lint: dict[str, Any] = {
        "task": "sequence-classification" if classes else "causal-lm",
        "labels": classes,
        "prepared": prepared(args.data),
        "settings": args.settings,
    }
    counts = tokenize_splits(args, classes)
    for split in SPLITS:
        lengths = counts[split].lengths
        lint[split] = describe(counts[split]) | samples(args, split, classes, lengths)
    labels = counts["train"].labels
    lint["label_counts"] = [labels[name] for name in classes] if classes else None
    lint["packing"] = pack(args, counts["train"].lengths, classes)
    lint["train"] |= lint["packing"].pop("train", {})
    write_json(args.output / "lint.json", lint)
    say(summary(lint))


def class_names(data: Path) -> list[str] | None:
    """All labels, in order; None for rows without any."""
    counts: Counter[str | None] = Counter()
    for split in SPLITS:
        column = pq.read_table(data / f"{split}.parquet", columns=["label"])["label"]
        for entry in column.value_counts().to_pylist():
            counts[entry["values"]] += entry["counts"]
    rows, without = counts.total(), counts.pop(None, 0)
    if rows == without:
        return None
    if without:
        raise UserError(
            f"{without} of {rows} rows have no label. Rows to classify and rows to write cannot be "
            "in one dataset: make two, or leave a source out."
        )
    check_labels(counts)
    return sorted(counts)


def check_labels(counts: Counter[str]) -> None:
    """Refuse what can be no set of classes."""
    if 2 <= len(counts) <= max(20, counts.total() / 2):
        return
    some = ", ".join(sorted(counts)[:5]) + ", …" * (len(counts) > 5)
    raise UserError(
        f"{counts.total()} rows have {len(counts)} different labels ({some}). Is it the right "
        "column? Map yours: `columns: {label: …}`."
    )


def check_writes(model: dict) -> None:
    """Rows without labels are for models that write. `model` is model.json."""
    if not model["causal"]:
        raise UserError(
            f"{model['architecture']} writes no text: it can be trained for `task: "
            "sequence-classification` alone, and these rows have no labels. Give it the columns "
            "`text` and `label`, or map yours under the dataset (`columns: {text: …, label: …}`), "
            "or choose a causal language model."
        )


def prepared(data: Path) -> dict:
    """What the page of the data check tells of the rule before."""
    stats = read_json(data / "stats.json")
    return {key: stats[key] for key in ("rows", "duplicates", "rejected", "overlap")}


@dataclass(frozen=True)
class Part:
    """What one process tokenizes at a time."""

    split: str
    rows: Path
    groups: list[int]
    """Row groups of the parquet file."""
    tokens: Path


def tokenize_splits(args: argparse.Namespace, classes: list[str] | None) -> dict[str, Counts]:
    """Token folders of all splits, by one pool of processes. Returns their counts."""
    counts = {split: Counts() for split in SPLITS}
    work = functools.partial(
        tokenize_part, model=args.model, settings=args.settings, classes=classes
    )
    with ExitStack() as stack:
        folders = {s: stack.enter_context(complete_directory(args.output / s)) for s in SPLITS}
        parts = [part for s in SPLITS for part in parts_of(s, args.data, folders[s])]
        for part, found in zip(parts, in_order(work, parts, args.threads), strict=True):
            counts[part.split].add(found)
    return counts


def parts_of(split: str, data: Path, folder: Path) -> list[Part]:
    rows = data / f"{split}.parquet"
    count = pq.read_metadata(rows).num_row_groups
    parts = [Part(split, rows, [i], folder / f"{i:05d}.arrow") for i in range(count)]
    # a split without rows is one file without rows, which can be opened
    return parts or [Part(split, rows, [], folder / "0.arrow")]


def tokenize_part(part: Part, model: Path, settings: dict, classes: list[str] | None) -> Counts:
    numbers = {name: number for number, name in enumerate(classes)} if classes else None
    encoder = Encoder(tokenizer_of(model, settings["trust_remote_code"]), settings, numbers)
    schema = CLASSES if classes else TOKENS
    with pa.OSFile(str(part.tokens), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for rows in read_rows(part):
            writer.write_batch(as_batch(encoder.encode(rows), schema))
    return encoder.counts


@functools.cache
def tokenizer_of(model: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(model, trust_remote_code)
    gc.freeze()  # what is loaded by now stays: no need to look through it for garbage
    return tokenizer


def read_rows(part: Part) -> Iterator[list[dict]]:
    file = pq.ParquetFile(part.rows)
    for batch in file.iter_batches(BATCH, row_groups=part.groups):
        size = max(1, int(BATCH_BYTES / (batch.nbytes / max(1, len(batch)) + 1)))
        for start in range(0, len(batch), size):
            yield batch.slice(start, size).to_pylist()


def as_batch(encoded: list[tuple], schema: pa.Schema) -> pa.RecordBatch:
    names, ids, labels = zip(*encoded, strict=True) if encoded else ([], [], [])
    columns = [names, ids, labels, list(map(len, ids))]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def pack(args: argparse.Namespace, lengths: Sequence[int], classes: list[str] | None) -> dict:
    """Pack the training split where that is asked for and safe."""
    asked, why_not = args.settings["packing"], None
    if asked:
        from finetune.isolation import why_not_isolated

        trust = args.settings["trust_remote_code"]
        config = AutoConfig.from_pretrained(args.model, trust_remote_code=trust)
        why_not = "each row has a label of its own" if classes else why_not_isolated(config)
    if why_not:
        say(f"not packed, rows are grouped by length instead: {why_not}")
    size = args.settings["max_length"] if asked and not why_not and lengths else None
    return {"asked": asked, "why_not": why_not} | pack_split(args.output / "train", lengths, size)


def samples(
    args: argparse.Namespace, split: str, classes: list[str] | None, lengths: Sequence[int]
) -> dict[str, list]:
    tokens = open_tokens(args.output / split)
    tokenizer = tokenizer_of(args.model, args.settings["trust_remote_code"])
    rows = (tokens[row] for row in sample_rows(lengths, SAMPLES[split]))
    return {"samples": [sample(row, tokenizer, classes) for row in rows]}


def summary(lint: dict) -> str:
    train = lint["train"]
    dropped = sum(sum(lint[split]["dropped"].values()) for split in SPLITS)
    taught = f"{train['supervised_tokens'] / max(1, train['tokens']):.0%} supervised"
    taught = f"{len(lint['labels'])} classes" if lint["labels"] else taught
    return (
        f"{train['tokens']} training tokens in {train['sequences']} rows (longest "
        f"{train['longest']}), {taught}; {dropped} rows left out"
    )


if __name__ == "__main__":
    run_script(main)
