"""A run that is stopped goes on as if nothing had been: two processes, both methods."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest

from survival import STEPS, Job

RUNS = ("tiny-qlora", "tiny-full")
GRACE = 30
"""Seconds between SIGTERM and SIGKILL, by SLURM's default."""


@pytest.mark.parametrize("run", RUNS)
def test_losses_and_weights_are_those_of_an_undisturbed_run(
    finished: Path, tmp_path: Path, undisturbed, run: str
) -> None:
    """Bitwise: rows, their order, dropout, optimizer, scheduler, and averages over lines."""
    job = Job(finished, tmp_path, run)
    job.start()
    job.wait_for_step(random.randrange(1, STEPS - 2))
    job.process.send_signal(random.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]))
    assert job.process.wait(timeout=GRACE) == 75, job.log.read_text()[-3000:]
    step = json.loads((job.state / "outcome.json").read_text())["step"]
    assert f"stopped after step {step}; the same command goes on from there" in job.said()
    assert not any((tmp_path / name).exists() for name in ("trained", "metrics.jsonl"))
    assert job.finish() == 0, job.log.read_text()[-3000:]
    assert job.losses() == undisturbed(run).losses()
    assert job.weights() == undisturbed(run).weights()
    assert job.events() == ["started", "stopped", "resumed"]
    assert job.record()["steps"] == STEPS
    assert job.record()["tokens"] == undisturbed(run).record()["tokens"]
    assert not job.state.exists()
