"""Memory as it was planned, and the same losses from compiled layers, on one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.files import read_json
from project import make_project, make_tiny_model, snakemake

pytestmark = pytest.mark.gpu
RUNS = {
    "qlora": {"method": "qlora"},
    "compiled": {"method": "qlora", "compile": True},
    "full": {"method": "full", "launch": "ddp"},
    "full-8bit": {"method": "full", "launch": "ddp", "optimizer": {"name": "adamw_8bit"}},
}
BF16 = 0.01
"""A few steps of 2^-8."""


LARGE = {
    "vocab_size": 32_000,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 512,
}
"""500 M parameters, so that what CUDA takes for itself is not most of the memory."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    make_tiny_model(folder / "model", **LARGE)
    defaults = {"gpus": 1, "batch": {"global": 8, "micro": "auto"}, "steps": 6}
    project = make_project(folder, folder / "model", defaults=defaults, runs=RUNS)
    targets = [f"results/runs/{run}/train.json" for run in RUNS]
    options = ("--cores", "all", "--resources", "gpu=1", "--configfile", "config.yaml")
    done = snakemake(*options, "--", *targets, cwd=project)
    assert done.returncode == 0, done.stdout[-4000:]
    return project


@pytest.mark.parametrize("run", ["qlora", "full", "full-8bit"])
def test_peak_memory_is_what_was_planned(trained: Path, run: str) -> None:
    """But for what CUDA takes for itself: 0.3 GB on a T4, 0.55 on an H100, and 0.8 are planned.
    More than planned ends a run; less leaves a part of a GPU empty."""
    folder = trained / f"results/runs/{run}"
    planned = read_json(folder / "plan.json")["memory"]
    own = planned["total"] - planned["parts"]["context"]
    reserved = read_json(folder / "train.json")["peak_memory"]["gpu_reserved"]
    assert 0.7 * own < reserved < 1.1 * own


def test_compiled_layers_give_the_losses_of_plain_ones(trained: Path) -> None:
    plain, compiled = (losses(trained / f"results/runs/{run}") for run in ("qlora", "compiled"))
    assert compiled == pytest.approx(plain, rel=BF16)
    assert compiled != plain
    assert read_json(trained / "results/runs/compiled/train.json")["compiled"] is True


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]
