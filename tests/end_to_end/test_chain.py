"""The whole chain, for real: two processes, NF4 under DDP and full weights under ZeRO-3."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from project import ROWS

RUNS = ("tiny-qlora", "tiny-full")


def read(path: Path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("run", RUNS)
def test_training_is_two_processes_with_the_configured_batch(finished: Path, run: str) -> None:
    record = read(finished / f"results/runs/{run}/train.json")
    split = (record["micro_batch"], record["accumulation"], record["world_size"])
    assert split == (1, 2, 2)
    assert record["steps"] == 4
    assert record["precision"] == "bfloat16"
    assert record["placement"]["devices"] == ["cpu"]
    assert record["backend"] == "gloo"


def test_trainable_counts(finished: Path) -> None:
    qlora = read(finished / "results/runs/tiny-qlora/train.json")["placement"]
    full = read(finished / "results/runs/tiny-full/train.json")["placement"]
    model = read(finished / "results/models/tiny/model.json")
    adapter = sum(
        4 * (layer["in_features"] + layer["out_features"]) * layer["count"]
        for layer in model["shapes"]["linear"]
    )
    assert (qlora["trainable_parameters"], qlora["sharded"]) == (adapter, False)
    assert (full["trainable_parameters"], full["sharded"]) == (model["parameters"], True)


@pytest.mark.parametrize("run", RUNS)
def test_loss_falls_and_every_step_is_logged_once(finished: Path, run: str) -> None:
    lines = (finished / f"results/runs/{run}/metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    assert [line["step"] for line in logged if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in logged if "eval_loss" in line] == [2, 4]
    losses = [line["eval_loss"] for line in logged if "eval_loss" in line]
    assert losses[1] < losses[0]


def test_zero3_learns(finished: Path) -> None:
    base = read(finished / "results/baselines/tiny/lights/metrics.json")["loss"]
    tuned = read(finished / "results/runs/tiny-full/evaluation/metrics.json")["loss"]
    assert tuned < base - 0.05


@pytest.mark.parametrize("run", RUNS)
def test_the_model_opens_without_peft(finished: Path, run: str) -> None:
    code = (
        "import sys; sys.modules['peft'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='auto')\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "print(m.dtype, m.config.use_cache, hasattr(m.config, 'quantization_config'),"
        " t.pad_token, m.generation_config.pad_token_id == t.pad_token_id)"
    )
    model = finished / f"results/runs/{run}/model"
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["torch.bfloat16", "True", "False", "<|endoftext|>", "True"]


@pytest.mark.parametrize("run", RUNS)
def test_merge_verified_every_tensor(finished: Path, run: str) -> None:
    record = read(finished / f"results/runs/{run}/merge.json")
    assert record["parameters"] == read(finished / "results/models/tiny/model.json")["parameters"]
    if run == "tiny-qlora":
        assert set(record["loss_merged"]) == {"original", "dequantized"}
        assert record["loss_merged"][record["base"]] <= record["loss_trained"] * 1.1


def test_evaluation_has_every_metric_and_every_row(finished: Path) -> None:
    folder = finished / "results/runs/tiny-qlora/evaluation"
    metrics = read(folder / "metrics.json")
    asked = {"loss", "perplexity", "token_accuracy", "exact_match", "rouge_l", "json_valid"}
    assert asked <= set(metrics)
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    stats = read(finished / "results/data/lights/stats.json")
    assert len(rows) == metrics["rows"] == stats["rows"]["test"] > 0
    assert all(row["prompt"].endswith("<|im_start|>assistant\n") for row in rows)
    assert metrics["prompts_too_long"] == 0
    equal = [row["prediction"].strip() == row["reference"].strip() for row in rows]
    assert metrics["exact_match"] == sum(equal) / len(rows)
    turn = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    pairs = {turn.format(**row): row["completion"] for row in ROWS}
    assert all(pairs[row["prompt"]] == row["reference"] for row in rows)


def test_report_compares_all(finished: Path) -> None:
    table = (finished / "results/report/summary.tsv").read_text().splitlines()
    assert len(table) == 1 + 3
    for figure in ("loss.svg", "memory.svg"):
        text = (finished / "results/report" / figure).read_text()
        assert all(run in text for run in RUNS)


def test_terminal_says_what_happens(finished: Path) -> None:
    said = (finished / "snakemake.out").read_text()
    assert "tiny-qlora: 4 steps" in said
    assert "step 4/4" in said
    assert "Traceback" not in said
    assert "WARNING" not in said


@pytest.mark.parametrize("run", RUNS)
def test_no_step_adds_a_warning_to_the_log(finished: Path, run: str) -> None:
    """DeepSpeed made 500 a step. A rank may warn a few times when it starts."""
    log = (finished / f"logs/train/{run}.log").read_text()
    assert log.count("Warning:") <= 10
