"""Rule tokenize_data: prepared rows to token ids and labels, for one model's tokenizer.

Reads the split parquet files and the model folder. Writes one Arrow folder per split
(`input_ids`, `labels`, `length`, `row`, `id`), which training opens read-only, and
`lint.json`: counts, supervised share, dropped rows, decoded samples.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq

from finetune.chat import IGNORED, encode, end_tokens, with_system
from finetune.cli import UserError, read_settings, run_script, say
from finetune.files import complete_directory, write_json
from finetune.splits import SPLITS
from finetune.tokenizer import load_tokenizer

SAMPLES = 3
ROWS_WORTH_A_PROCESS = 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", required=True, type=read_settings)
    parser.add_argument("--data", required=True, type=Path, help="folder of prepare_data")
    parser.add_argument("--model", required=True, type=Path, help="pretrained/ of fetch_model")
    parser.add_argument("--output", required=True, type=Path, help="folder")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    tokenizer = load_tokenizer(args.model, args.settings["trust_remote_code"])
    if tokenizer.chat_template is None:
        raise UserError(
            "this model has no chat template. Set `chat_template: plain` under the model (a base "
            "model: text, newline, answer), or `chatml`, or a Jinja file of your own."
        )
    datasets.disable_caching()  # it would give old tokens after a change of finetune/chat.py
    lint = {}
    for split in SPLITS:
        rows = read_rows(args.data / f"{split}.parquet")
        tokens, counts = tokenize(rows, tokenizer, args.settings, args.threads)
        with complete_directory(args.output / split) as folder:
            # an empty split would be saved in no file at all, which cannot be opened
            tokens.save_to_disk(folder, num_shards=None if len(tokens) else 1)
        lint[split] = counts | describe(tokens, tokenizer)
    write_json(args.output / "lint.json", lint)
    report(lint)


def read_rows(path: Path) -> datasets.Dataset:
    """Canonical rows. `datasets` can neither read an empty parquet file nor map over none."""
    if pq.read_metadata(path).num_rows == 0:
        return datasets.Dataset.from_dict({name: [] for name in FEATURES}, features=FEATURES)
    return datasets.Dataset.from_parquet(str(path))


def tokenize(
    rows: datasets.Dataset, tokenizer, settings: dict, threads: int
) -> tuple[datasets.Dataset, dict]:
    """Encode every row; leave out, and count, those that cannot be trained on."""
    processes = min(threads, len(rows) // ROWS_WORTH_A_PROCESS)
    tokens = rows.map(
        functools.partial(encode_rows, tokenizer=tokenizer, **settings),
        batched=True,
        remove_columns=["messages"] if len(rows) else None,
        num_proc=processes if processes > 1 else None,
        features=FEATURES,
    )
    counts = Counter(tokens["status"])
    kept = tokens.filter(is_kept, batched=True, input_columns="status").remove_columns("status")
    # error messages of training name rows by this index
    kept = kept.add_column("row", np.arange(len(kept)))
    return kept, {"rows": counts["kept"], "too_long": counts["too_long"]}


FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "input_ids": datasets.List(datasets.Value("int32")),
        "labels": datasets.List(datasets.Value("int32")),
        "length": datasets.Value("int32"),
        "status": datasets.Value("string"),
    }
)


def is_kept(statuses: list[str]) -> list[bool]:
    return [status == "kept" for status in statuses]


def encode_rows(batch: dict, *, tokenizer, system_prompt: str | None, max_length: int, **_) -> dict:
    """Columns of FEATURES for a batch of canonical rows."""
    out: dict[str, list] = {name: [] for name in FEATURES}
    for name, messages in zip(batch["id"], batch["messages"], strict=True):
        example = encode(tokenizer, with_system(messages, system_prompt))
        length = len(example.input_ids)
        values = {"id": name, "length": length} | vars(example)
        values["status"] = "kept" if length <= max_length else "too_long"
        for key, value in values.items():
            out[key].append(value)
    return out


def describe(tokens: datasets.Dataset, tokenizer) -> dict:
    """What a split holds, in tokens, and how its first rows read with their mask."""
    supervised, ended = 0, 0
    ends = end_tokens(tokenizer)
    for labels in tokens["labels"]:
        supervised += sum(label != IGNORED for label in labels)
        ended += labels[-1] in ends
    lengths = tokens["length"][:]
    return {
        "tokens": sum(lengths),
        "supervised_tokens": supervised,
        "rows_with_end_token": ended,
        "longest": max(lengths, default=0),
        "samples": [
            sample(row, tokenizer) for row in tokens.select(range(min(SAMPLES, len(tokens))))
        ],
    }


def sample(row: dict, tokenizer) -> dict:
    """One row decoded: all of it, and the part that is trained on."""
    trained_on = [label for label in row["labels"] if label != IGNORED]
    decoded = {"text": row["input_ids"], "trained_on": trained_on}
    return {"id": row["id"]} | {key: tokenizer.decode(ids) for key, ids in decoded.items()}


def report(lint: dict) -> None:
    """Say what was kept; refuse a training split that cannot teach."""
    train = lint["train"]
    if train["rows"] == 0:
        raise UserError(
            f"all {train['too_long']} training rows are longer than max_length; raise it under "
            "the dataset."
        )
    dropped = sum(split["too_long"] for split in lint.values())
    share = train["supervised_tokens"] / train["tokens"]
    say(
        f"tokenize_data: {train['tokens']} training tokens in {train['rows']} rows (longest "
        f"{train['longest']}), {share:.0%} supervised; {dropped} rows over max_length left out"
    )


if __name__ == "__main__":
    run_script(main)
