"""Gemma 3 with a vision tower through the whole chain: QLoRA under DDP, full under ZeRO-3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from project import make_project, make_tiny_gemma, snakemake

pytestmark = pytest.mark.slow
RUNS = ("tiny-qlora", "tiny-full")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    make_tiny_gemma(folder / "base")
    make_project(folder, folder / "base")
    done = snakemake(
        *("--cores", "2", "--resources", "gpu=2", "--configfile", "config.yaml"), cwd=folder
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return folder / "results"


@pytest.mark.parametrize("run", RUNS)
def test_the_merged_model_has_the_towers_of_its_base(seen: Path, run: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(seen / "models/tiny/pretrained")
    merged, found = AutoModelForCausalLM.from_pretrained(
        seen / f"runs/{run}/model", output_loading_info=True
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(merged).__name__ == "Gemma3ForConditionalGeneration"
    same = {n: torch.equal(t, merged.state_dict()[n]) for n, t in base.state_dict().items()}
    beside = [n for n in same if "vision_tower" in n or "multi_modal_projector" in n]
    assert len(beside) > 30
    assert all(same[name] for name in beside)
    changed = [name for name, is_same in same.items() if not is_same]
    assert len(changed) >= 14  # seven layers in each of two blocks
    assert all("language_model" in name or name == "lm_head.weight" for name in changed)


def test_what_is_trained_is_what_was_planned(seen: Path) -> None:
    shapes = json.loads((seen / "models/tiny/model.json").read_text())["shapes"]
    qlora, full = (
        json.loads((seen / f"runs/{run}/train.json").read_text())["placement"] for run in RUNS
    )
    adapter = sum(4 * (x["in_features"] + x["out_features"]) * x["count"] for x in shapes["linear"])
    assert qlora["trainable_parameters"] == adapter
    assert full["trainable_parameters"] == shapes["parameters"] - shapes["frozen"]


@pytest.mark.parametrize("run", RUNS)
def test_the_loss_falls(seen: Path, run: str) -> None:
    lines = (seen / f"runs/{run}/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["eval_loss"] for line in lines if "eval_loss" in line]
    assert losses[-1] < losses[0]
