"""How fast is data made ready, against the ordinary way, on the same rows and processes.

    pip install --no-deps trl==1.16.0   # to compare with; the rest of it is there
    snakemake results/models/smollm2/pretrained
    python tests/benchmarks/tokenization.py --rows 1000000

The ordinary way is TRL's: `load_dataset`, then `datasets.map` over single rows with two calls of
`apply_chat_template`, one for the prompt and one for all, whose common prefix is masked (TRL 1.16,
trainer/sft_trainer.py, tokenize_fn). It is timed on fewer rows, since rows/s is what is compared.
Both make ids and the mask of the answers; ours also splits, finds duplicates and checks every row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "workflow" / "scripts"
sys.path.insert(0, str(SCRIPTS))

CAPACITY = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--ordinary-rows", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--model", type=Path, default=Path("results/models/smollm2/pretrained"))
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        ours = time_ours(folder, args)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
        print(f"ours: peak {peak:.2f} GB resident, the largest of the processes")
        ordinary = time_ordinary(folder, args)
        for step in ("read", "tokenize", "all"):
            print(f"{step}: {ours[step] / ordinary[step]:.1f} times the ordinary way's rows/s")
        compare_packing(folder)


def time_ours(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Rows/s of prepare_data, of tokenize_data, and of both."""
    from finetune.config import Dataset, Model
    from finetune.stages import prepare_settings, tokenize_settings

    write_rows(folder / "rows.jsonl", args.rows)
    dataset = Dataset(source=str(folder / "rows.jsonl"), max_length=CAPACITY)
    threads = ["--threads", str(args.processes)]
    settings = json.dumps(prepare_settings(dataset))
    options = ["--output", str(folder), "--rejects", str(folder / "rejects.jsonl")]
    read = run("prepare_data.py", "--settings", settings, *options, *threads)
    settings = json.dumps(tokenize_settings(dataset, Model(source="any")))
    options = ["--data", str(folder), "--model", str(args.model), "--output", str(folder / "ours")]
    tokenize = run("tokenize_data.py", "--settings", settings, *options, *threads)
    return speeds("ours", args.rows, read, tokenize)


def run(script: str, *options: str) -> float:
    """Seconds of a rule's script, imports included."""
    started = time.monotonic()
    subprocess.run([sys.executable, SCRIPTS / script, *options], check=True, stderr=2)
    return time.monotonic() - started


def time_ordinary(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    import datasets
    from transformers import AutoTokenizer

    write_rows(folder / "few.jsonl", args.ordinary_rows)
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    started = time.monotonic()
    cache = str(folder / "cache")
    rows = datasets.load_dataset(
        "json", data_files=str(folder / "few.jsonl"), split="train", cache_dir=cache
    )
    read = time.monotonic() - started
    started = time.monotonic()
    rows.map(
        ordinary_row,
        fn_kwargs={"tokenizer": tokenizer},
        remove_columns=rows.column_names,
        num_proc=args.processes,
    )
    return speeds("ordinary", len(rows), read, time.monotonic() - started)


def ordinary_row(row: dict, tokenizer) -> dict:
    prompt = tokenizer.apply_chat_template(
        row["messages"][:-1], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    ids = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
    start = next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), None)
    start = len(prompt) if start is None else start
    return {"input_ids": ids, "completion_mask": [0] * start + [1] * (len(ids) - start)}


def speeds(name: str, rows: int, read: float, tokenize: float) -> dict[str, float]:
    found = {"read": rows / read, "tokenize": rows / tokenize, "all": rows / (read + tokenize)}
    listed = ", ".join(f"{step} {speed:,.0f}" for step, speed in found.items())
    print(f"{name}, rows/s of {rows:,} rows: {listed}")
    return found


def write_rows(path: Path, count: int) -> None:
    """Short conversations of English words, all different."""
    words = re.findall(r"[A-Za-z]+", (ROOT / "LICENSE").read_text())
    draw = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            said = [" ".join(draw.choices(words, k=draw.randint(5, 30))) for _ in range(2)]
            turns = zip(("user", "assistant"), (f"{said[0]} {number}", said[1]), strict=True)
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


def compare_packing(folder: Path) -> None:
    """Tokens over capacity, for the same rows."""
    import numpy as np

    from finetune.packing import best_fit_decreasing, packing_efficiency
    from finetune.tokens import open_tokens

    lengths = np.array(open_tokens(folder / "ours" / "train")["length"][:])
    started = time.monotonic()
    packs = int(best_fit_decreasing(lengths, CAPACITY).max()) + 1
    seconds = time.monotonic() - started
    share = packing_efficiency(lengths, packs, CAPACITY)
    print(
        f"packing, ours: {share:.4%} of the room filled, {seconds:.1f} s for {len(lengths):,} rows"
    )
    try:
        from trl.data_utils import pack_dataset
    except ImportError:
        print("packing, TRL: not installed")
        return
    import datasets

    rows = datasets.Dataset.from_dict({"input_ids": [[0] * n for n in lengths[:100_000]]})
    theirs = len(pack_dataset(rows, CAPACITY, strategy="bfd"))
    same = int(best_fit_decreasing(lengths[:100_000], CAPACITY).max()) + 1
    total = lengths[:100_000].sum() / CAPACITY
    print(f"packing {len(rows):,} rows: TRL fills {total / theirs:.4%}, ours {total / same:.4%}")


if __name__ == "__main__":
    main()
