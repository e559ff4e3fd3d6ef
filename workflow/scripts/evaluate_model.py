"""Rules evaluate_run and evaluate_baseline: how good a model is on the test split.

One script for tuned and base models, CPU and GPU. Reads a model folder, the test rows and their
tokens. Writes `metrics.json` (loss, perplexity, token accuracy, and the metrics on generated
text that the dataset asks for) and `predictions.jsonl` (prompt, reference, prediction). For
labelled rows: loss, accuracy, F1 and confusion matrix, and each row's class (text, reference,
prediction, probability).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from finetune.batch import NO_GPU
from finetune.cli import UserError, read_settings, run_script, say, speak_for
from finetune.files import check_complete, read_json, write_aside, write_json
from finetune.leases import lease, visible_devices
from finetune.peaks import PeakMemory
from finetune.provenance import code_commit

METRICS = Path(__file__).resolve().parents[1] / "metrics"
CODE = code_commit()  # before a later commit can be taken for the code that runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", required=True, type=read_settings)
    parser.add_argument("--gpus", default=1, type=int, help="that hold the model together")
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path, help="test.parquet")
    parser.add_argument("--tokens", required=True, type=Path, help="test/ of tokenize_data")
    parser.add_argument("--lint", required=True, type=Path, help="lint.json")
    parser.add_argument("--metrics", required=True, type=Path, help="metrics.json")
    parser.add_argument("--predictions", required=True, type=Path, help="predictions.jsonl")
    args = parser.parse_args()
    speak_for(whose(args.metrics.parent))
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_EVALUATE_OFFLINE"] = "1"
    check_complete(args.model)  # before a GPU is waited for
    devices, count = visible_devices(), args.gpus
    if devices and not count:
        raise UserError(NO_GPU)
    if 0 < len(devices) < count:
        raise UserError(
            f"evaluation.gpus asks for {count} GPUs and {len(devices)} are visible; set it lower, "
            "or run where there are as many."
        )
    with lease(count, devices) as ids:
        # read when CUDA starts, which nothing did so far
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)
        evaluate_model(args)


def whose(folder: Path) -> str:
    """The run of `runs/{run}/evaluation`; both names of `baselines/{model}/{dataset}`."""
    owner = folder.parent.name
    return owner if folder.name == "evaluation" else f"{owner} on {folder.name}"


def evaluate_model(args: argparse.Namespace) -> None:
    """Score, write the predictions, then the metrics."""
    from finetune.provenance import process_seconds
    from finetune.tokens import open_tokens

    tokens, lint = open_tokens(args.tokens), read_json(args.lint)
    if len(tokens) == 0:
        raise UserError("the test split is empty; give split.test a share under the dataset.")
    evaluate = evaluate_text if lint["labels"] is None else evaluate_classes
    with PeakMemory() as memory:
        results, lines = evaluate(args, tokens, lint)
    write_predictions(args.predictions, lines)
    results |= {"peak_memory": memory.peak, "wall_seconds": process_seconds(), "code": CODE}
    write_json(args.metrics, {"rows": len(tokens)} | results)
    say(summary(results))


def evaluate_text(args: argparse.Namespace, tokens, lint: dict) -> tuple[dict, list[dict]]:
    """Score the references, generate answers, judge them."""
    model, tokenizer = load(args)
    results = score(model, tokenizer, tokens, args.settings)
    rows = test_rows(args.data, set(tokens["id"]), tokenizer, args.settings)
    if not rows:
        return results, []
    lines, facts = generate(model, tokenizer, rows, args.settings)
    results |= facts | (judge(lines, args.settings["metrics"]) if lines else {})
    return results, lines


def load(args: argparse.Namespace, labels: list[str] | None = None) -> tuple:
    """Model and tokenizer, on the GPUs if there are any."""
    import torch

    from finetune.modeling import load_for_inference
    from finetune.tokenizer import load_tokenizer

    trust = args.settings["trust_remote_code"]
    device = {0: "cpu", 1: "cuda:0"}.get(torch.cuda.device_count(), "balanced")
    model = load_for_inference(args.model, trust, device=device, labels=labels)
    return model, load_tokenizer(args.model, trust)


def score(model, tokenizer, tokens, settings: dict) -> dict:
    """Loss, perplexity and token accuracy over the supervised tokens of the test split."""
    import torch

    from finetune.collator import RowCollator
    from finetune.halving import in_halves
    from finetune.sampling import by_length
    from finetune.scores import scores_in_pieces

    metric = load_metric("token_scores")
    tokenizer.padding_side = "right"
    collate = RowCollator(tokenizer)

    @torch.inference_mode()
    def scores(chosen: list[int]) -> list[list[float]]:
        batch = collate([tokens[i] for i in chosen]).to(model.device)
        return scores_in_pieces(model, batch).double().T.tolist()

    for batch in by_length(tokens["length"][:], settings["batch_size"]):
        for _, (nll, count, correct) in in_halves(scores, batch):
            metric.add_batch(nll=nll, tokens=count, correct=correct)
    return metric.compute()


def evaluate_classes(args: argparse.Namespace, tokens, lint: dict) -> tuple[dict, list[dict]]:
    """Judge a classifier. A base model that does not know these classes has a head of random
    numbers, so a model of no text at all stands in: how often each class occurs in training."""
    import numpy as np
    from transformers import AutoConfig

    from finetune.classification import class_lines, class_prior, predict

    labels, record = lint["labels"], {}
    config = AutoConfig.from_pretrained(
        args.model, trust_remote_code=args.settings["trust_remote_code"]
    )
    if config.id2label == dict(enumerate(labels)):
        model, tokenizer = load(args, labels)
        nats = predict(model, tokenizer, tokens, args.settings["batch_size"])
    else:
        record["baseline"] = "class prior"
        nats = np.tile(class_prior(lint["label_counts"]), (len(tokens), 1))
    wanted = np.asarray(tokens["labels"])
    results = load_metric("classification").compute(
        predictions=nats.argmax(1),
        references=wanted,
        nll=-nats[np.arange(len(tokens)), wanted],
        labels=labels,
    )
    return record | results, class_lines(args.data, tokens["id"], labels, nats)


def load_metric(name: str):
    """A metric of workflow/metrics; the hub is never asked."""
    import evaluate

    # each process its own id: parallel jobs would otherwise share one cache file
    return evaluate.load(str(METRICS / name), experiment_id=f"{name}-{os.getpid()}")


def test_rows(data: Path, kept: set[str], tokenizer, settings: dict) -> list[dict]:
    """id, rendered prompt and reference: the last assistant turn is what must be predicted.
    Plain text has none, and is judged by its loss alone.

    `kept` are the ids within max_length: the rows that the loss is taken on, and no others.
    """
    import pyarrow.parquet as pq

    from finetune.chat import conversation, prompt_text, reference_text

    rows = pq.read_table(data).to_pylist()
    rows = [row for row in rows if row["id"] in kept and row["messages"]]
    out = []
    for row in rows[: settings["rows"]]:
        talk = conversation(row, settings["system_prompt"], "all")
        prompt = prompt_text(tokenizer, talk, settings["template_options"])
        reference = reference_text(tokenizer, talk, prompt, settings["template_options"])
        out.append({"id": row["id"], "prompt": prompt, "reference": reference})
    return out


def generate(model, tokenizer, rows: list[dict], settings: dict) -> tuple[list[dict], dict]:
    """The rows with greedy answers, and how fast they came. A row whose prompt fills the model's
    context is left out and counted."""
    from finetune.generation import answer
    from finetune.thoughts import said

    started = time.monotonic()
    answers = answer(
        model,
        tokenizer,
        [row["prompt"] for row in rows],
        max_new_tokens=settings["max_new_tokens"],
        batch_size=settings["batch_size"],
    )
    seconds = time.monotonic() - started
    answered = [(row, a) for row, a in zip(rows, answers, strict=True) if a is not None]
    facts = {"generated_rows": len(answered), "prompts_too_long": len(rows) - len(answered)}
    if not answered:
        return [], facts
    count = sum(a.tokens for _, a in answered)
    lines = [row | {"prediction": a.text, "stopped": a.stopped} for row, a in answered]
    return lines, facts | {
        "stopped_share": sum(a.stopped for _, a in answered) / len(answered),
        "unfinished_thoughts": sum(said(row["prompt"], a.text) is None for row, a in answered),
        "generated_tokens": count,
        "generated_tokens_per_second": count / seconds,
    }


def judge(lines: list[dict], names: list[str]) -> dict[str, float]:
    """The dataset's metrics on generated text, thoughts left out. Nothing is said after a thought
    that does not end."""
    from finetune.thoughts import said

    pairs = {
        "predictions": [said(line["prompt"], line["prediction"]) or "" for line in lines],
        "references": [said("", line["reference"]) or "" for line in lines],
    }
    results: dict[str, float] = {}
    for name in names:
        results |= load_metric(name).compute(**pairs)
    return results


def write_predictions(path: Path, lines: list[dict]) -> None:
    with write_aside(path) as aside, open(aside, "w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def summary(results: dict) -> str:
    names = ("exact_match", "rouge_l", "json_valid", "json_equal", "accuracy", "macro_f1")
    shown = [f"{name} {results[name]:.1%}" for name in names if name in results]
    if skipped := results.get("prompts_too_long"):
        shown.append(f"{skipped} prompts fill the context and got no answer")
    if thoughts := results.get("unfinished_thoughts"):
        shown.append(
            f"{thoughts} answers ended inside a thought and count as empty: raise "
            "evaluation.max_new_tokens, or set template_options: {enable_thinking: false}"
        )
    return ", ".join([f"loss {results['loss']:.4f}", *shown])


if __name__ == "__main__":
    run_script(main)
