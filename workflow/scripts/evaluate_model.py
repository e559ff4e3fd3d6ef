"""Rules evaluate_run and evaluate_baseline: how good a model is on the test split.

One script for tuned and base models, CPU and GPU. Reads a model folder, the test rows and their
tokens. Writes `metrics.json` (loss, perplexity, token accuracy, and the metrics on generated
text that the dataset asks for) and `predictions.jsonl` (prompt, reference, prediction).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from finetune.cli import Refusal, run_script, say, settings
from finetune.files import write_aside, write_json
from finetune.leases import lease, visible_devices

METRICS = Path(__file__).resolve().parents[1] / "metrics"
STARTED = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", required=True, type=settings)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path, help="test.parquet")
    parser.add_argument("--tokens", required=True, type=Path, help="test/ of tokenize_data")
    parser.add_argument("--metrics", required=True, type=Path, help="metrics.json")
    parser.add_argument("--predictions", required=True, type=Path, help="predictions.jsonl")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_EVALUATE_OFFLINE"] = "1"
    with lease(1, visible_devices()) as ids:
        if ids:  # read when CUDA starts, which nothing did so far
            os.environ["CUDA_VISIBLE_DEVICES"] = ids[0]
        evaluate_model(args)


def evaluate_model(args: argparse.Namespace) -> None:
    """Score, generate, judge, write."""
    import torch

    from finetune.collator import open_tokens
    from finetune.modeling import load_for_inference
    from finetune.provenance import code_commit, peak_memory
    from finetune.tokenizer import load_tokenizer

    trust = args.settings["trust_remote_code"]
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model = load_for_inference(args.model, trust, device=device)
    tokenizer = load_tokenizer(args.model, trust)
    results = score(model, tokenizer, open_tokens(args.tokens), args.settings)
    rows = test_rows(args.data, tokenizer, args.settings)
    answers, speed = generate(model, tokenizer, rows, args.settings)
    results |= judge(answers, rows, args.settings["metrics"]) | speed
    write_predictions(args.predictions, rows, answers)
    wall = time.monotonic() - STARTED
    results |= {"peak_memory": peak_memory(), "wall_seconds": wall, "code": code_commit()}
    write_json(args.metrics, results)
    say(f"evaluate_model: {args.model}: {summary(results)}")


def score(model, tokenizer, tokens, settings: dict) -> dict:
    """Loss, perplexity and token accuracy over the supervised tokens of the test split."""
    import torch

    from finetune.collator import RowCollator
    from finetune.scores import batch_scores

    if len(tokens) == 0:
        raise Refusal("the test split is empty; give split.test a share under the dataset.")
    metric = load_metric("token_scores")
    tokenizer.padding_side = "right"
    collate, size = RowCollator(tokenizer), settings["batch_size"]
    order = sorted(range(len(tokens)), key=tokens["length"].__getitem__)
    for start in range(0, len(order), size):
        batch = collate([tokens[i] for i in order[start : start + size]]).to(model.device)
        with torch.inference_mode():
            nll, count, correct = batch_scores(model, batch)[0].double().T.tolist()
        metric.add_batch(nll=nll, tokens=count, correct=correct)
    return {"rows": len(tokens)} | metric.compute()


def load_metric(name: str):
    """A metric of workflow/metrics; the hub is never asked."""
    import evaluate

    # each process its own id: parallel jobs would otherwise share one cache file
    return evaluate.load(str(METRICS / name), experiment_id=f"{name}-{os.getpid()}")


def test_rows(data: Path, tokenizer, settings: dict) -> list[dict]:
    """id, rendered prompt and reference: the last assistant turn is what must be predicted."""
    import pyarrow.parquet as pq

    from finetune.chat import render, with_system

    rows = pq.read_table(data).slice(0, settings["rows"]).to_pylist()
    return [
        {
            "id": row["id"],
            "prompt": render(
                tokenizer, with_system(row["messages"][:-1], settings["system_prompt"]), True
            ),
            "reference": row["messages"][-1]["content"],
        }
        for row in rows
    ]


def generate(model, tokenizer, rows: list[dict], settings: dict) -> tuple[list, dict]:
    """Greedy answers, and how fast they came."""
    from finetune.generation import answer

    started = time.monotonic()
    answers = answer(
        model,
        tokenizer,
        [row["prompt"] for row in rows],
        max_new_tokens=settings["max_new_tokens"],
        batch_size=settings["batch_size"],
    )
    count = sum(a.tokens for a in answers)
    return answers, {
        "generated_rows": len(answers),
        "stopped_share": sum(a.stopped for a in answers) / len(answers),
        "generated_tokens": count,
        "generated_tokens_per_second": count / (time.monotonic() - started),
    }


def judge(answers: list, rows: list[dict], names: list[str]) -> dict[str, float]:
    """The dataset's metrics on generated text."""
    pairs = {
        "predictions": [a.text for a in answers],
        "references": [row["reference"] for row in rows],
    }
    results: dict[str, float] = {}
    for name in names:
        results |= load_metric(name).compute(**pairs)
    return results


def write_predictions(path: Path, rows: list[dict], answers: list) -> None:
    with write_aside(path) as aside, open(aside, "w", encoding="utf-8") as file:
        for row, given in zip(rows, answers, strict=True):
            line = {**row, "prediction": given.text, "stopped": given.stopped}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def summary(results: dict) -> str:
    names = ("exact_match", "rouge_l", "json_valid", "json_equal")
    shown = [f"{name} {results[name]:.1%}" for name in names if name in results]
    return ", ".join([f"loss {results['loss']:.4f}", *shown])


if __name__ == "__main__":
    run_script(main)
