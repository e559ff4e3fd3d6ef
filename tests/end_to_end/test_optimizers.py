"""Moments in 8 bit: a run that stops goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from survival import STEPS, Job

pytestmark = pytest.mark.slow
STOP = """
if step == 5 and not os.path.exists(self.args.output_dir + "/outcome.json"):
    open(self.args.output_dir + "/stop", "w").close()
"""


def job(finished: Path, folder: Path) -> Job:
    """All weights under DDP."""
    made = Job(finished, folder, "tiny-full").with_settings(launch="ddp")
    made.settings["launch"] = "ddp"
    made.settings["optimizer"] |= {"name": "adamw_8bit"}
    return made


def test_8_bit_moments_are_saved_and_restored_bitwise(finished: Path, tmp_path: Path) -> None:
    whole, stopped = job(finished, tmp_path / "whole"), job(finished, tmp_path / "stopped")
    assert whole.finish() == 0, whole.log.read_text()[-3000:]
    assert stopped.finish(fault=STOP) == 75, stopped.log.read_text()[-3000:]
    [step] = stopped.checkpoints()
    saved = torch.load(stopped.state / f"checkpoint-{step}" / "optimizer.pt", weights_only=True)
    moments = {state["state1"].dtype for state in map(unwrapped, saved["state"].values())}
    assert torch.uint8 in moments
    assert stopped.finish() == 0, stopped.log.read_text()[-3000:]
    assert stopped.losses() == whole.losses()
    assert stopped.weights() == whole.weights()
    assert stopped.record()["steps"] == STEPS


def unwrapped(state: dict) -> dict:
    """bitsandbytes saves moments in a dictionary of their own."""
    return state | state.get("__bnb_optimizer_quant_state__", {})
