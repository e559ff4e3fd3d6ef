"""One script under every launcher, and the same losses from all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

# bf16 has 8 bits of mantissa: a relative step of 2^-8 = 0.4 %. DDP computes under autocast from
# fp32 weights, ZeRO from bf16 weights, so their losses differ by a few such steps.
BF16 = 0.01


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


@pytest.fixture(scope="module")
def ddp(launch) -> tuple[Path, list[float]]:
    code, output, folder = launch(2, 1, launch="ddp")
    assert code == 0, output[-3000:]
    return folder, losses(folder)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "zero3-offload"])
def test_losses_agree_with_ddp(launch, ddp, strategy: str) -> None:
    code, output, folder = launch(2, 1, launch=strategy)
    assert code == 0, output[-3000:]
    assert losses(folder) == pytest.approx(ddp[1], rel=BF16)


def test_batch_split_changes_nothing(launch, ddp) -> None:
    """(micro 4, accumulation 1, 1 process) = (micro 1, accumulation 2, 2 processes), in loss and
    gradient, for rows of unequal length."""
    code, output, folder = launch(1, 4, launch="ddp")
    assert code == 0, output[-3000:]
    assert losses(folder) == pytest.approx(ddp[1], rel=BF16)
    assert first_norm(folder) == pytest.approx(first_norm(ddp[0]), rel=0.02)
    record = json.loads((folder / "train.json").read_text())
    assert (record["world_size"], record["micro_batch"], record["accumulation"]) == (1, 4, 1)


def first_norm(folder: Path) -> float:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["grad_norm"]


SMALL_PIECES = """
import os
if "RANK" in os.environ:
    import sys
    sys.path.insert(0, {scripts!r})
    from finetune import head
    head.PIECE = 1_000
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_loss_in_pieces_is_the_same(
    launch, ddp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    scripts = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
    (tmp_path / "sitecustomize.py").write_text(SMALL_PIECES.format(scripts=str(scripts)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, output, folder = launch(2, 1, launch=strategy)
    assert code == 0, output[-3000:]
    assert "sitecustomize" not in output  # it was read without an error
    assert losses(folder) == pytest.approx(ddp[1], rel=BF16)
