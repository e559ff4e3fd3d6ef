"""Training with compiled layers: the losses and the saved names of training without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from finetune.files import read_json

pytestmark = pytest.mark.slow
ADAPTERS = {
    "lora": {"rank": 4, "alpha": 8, "dropout": 0.05, "target_modules": "all-linear"},
    "quantization": {"type": "nf4", "double": True},
}
RUNS = {
    "qlora": {"method": "qlora", "launch": "ddp"} | ADAPTERS,
    "full": {"method": "full", "launch": "zero2"},
}
BF16 = 0.01
"""Fused operations round less often: a few steps of 2^-8."""


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines for name in ("loss", "eval_loss") if name in line]


def tensors(folder: Path) -> set[tuple[str, tuple[int, ...]]]:
    found = set()
    for file in (folder / "trained").glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            names = weights.keys()
            found |= {(name, tuple(weights.get_slice(name).get_shape())) for name in names}
    return found


@pytest.mark.parametrize("run", RUNS)
def test_compiled_layers_train_as_plain_ones_do(launch, run: str) -> None:
    folders = []
    for compiled in (False, True):
        code, output, folder = launch(2, 1, planned={"compile": compiled}, **RUNS[run])
        assert code == 0, output[-3000:]
        assert read_json(folder / "train.json")["compiled"] is compiled
        folders.append(folder)
    assert losses(folders[1]) == pytest.approx(losses(folders[0]), rel=BF16)
    assert losses(folders[1]) != losses(folders[0])  # something was fused
    assert tensors(folders[1]) == tensors(folders[0])
