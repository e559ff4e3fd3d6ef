"""A run that is stopped goes on as if nothing had been: two processes, both methods."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from survival import EVERY_STEP, STEPS, Job

RUNS = ("tiny-qlora", "tiny-full")
GRACE = 30
"""Seconds between SIGTERM and SIGKILL, by SLURM's default."""


@pytest.mark.parametrize("run", RUNS)
def test_losses_and_weights_are_those_of_an_undisturbed_run(
    finished: Path, tmp_path: Path, undisturbed, run: str
) -> None:
    """Bitwise: rows, their order, dropout, optimizer, scheduler, and averages over lines."""
    job = Job(finished, tmp_path, run)
    job.start(fault="time.sleep(0.1)")  # time to be stopped in
    job.wait_for_step(random.choice([1, 4]))
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


STOP_IN_VALIDATION = """
def ask(batches, score=self.score):
    if self.state.global_step == {step}:
        open(self.args.output_dir + "/stop", "w").close()
    return score(batches)
if step == 1:
    self.score = ask
"""


@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.slow), STEPS])
def test_a_validation_that_was_cut_short_is_made_up_for(
    finished: Path, tmp_path: Path, undisturbed, step: int
) -> None:
    """In the middle, and after the last step, when nothing is left to train."""
    job = Job(finished, tmp_path)
    assert job.finish(fault=STOP_IN_VALIDATION.format(step=step)) == 75
    assert job.checkpoints() == [step]
    assert not any(line["step"] == step and "eval_loss" in line for line in job.lines())
    assert job.finish() == 0, job.log.read_text()[-3000:]
    assert job.losses() == undisturbed("tiny-qlora").losses()
    assert job.weights() == undisturbed("tiny-qlora").weights()
    assert job.record()["steps"] == STEPS


@pytest.mark.slow
def test_a_stop_before_the_first_step_saves_nothing_and_loses_nothing(
    finished: Path, tmp_path: Path
) -> None:
    job = Job(finished, tmp_path, steps=2)
    job.start()
    while len(job.processes()) < 4:  # the ranks load libraries
        assert job.process.poll() is None
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(timeout=60) == 75
    assert job.checkpoints() == []
    assert job.finish() == 0
    assert job.events() == ["started", "stopped", "started"]


def test_a_number_that_is_none_keeps_the_last_good_checkpoint(
    finished: Path, tmp_path: Path
) -> None:
    job = Job(finished, tmp_path).with_settings(**EVERY_STEP)
    fault = """
if step == 4:
    for parameter in self.model.parameters():
        if parameter.requires_grad: parameter.data.fill_(float("nan"))
"""
    assert job.finish(fault=fault) == 1
    [line] = [line for line in job.said().splitlines() if "ERROR" in line]
    assert "the loss is nan at step 4, rows rows.jsonl:" in line
    assert job.checkpoints() == [2, 3]


NEARLY_OVER = """
if rank == 1 and step == 4:
    self.stopper.deadline.end = time.time() + 1
"""


def test_a_run_saves_before_the_jobs_time_ends_and_no_signal_is_sent(
    finished: Path, tmp_path: Path, undisturbed
) -> None:
    """One rank's clock is enough. The first save comes early, to know how long one takes."""
    job = Job(finished, tmp_path)
    hour = {"FINETUNE_END_TIME": str(time.time() + 3600)}
    assert job.finish(fault=NEARLY_OVER, **hour) == 75, job.log.read_text()[-3000:]
    over = "the job's time is nearly over: stopped after step 4;"
    assert f"launch {job.folder.name}: {over}" in job.said()
    assert job.checkpoints() == [1, 4]
    pace = json.loads((job.state / "pace.json").read_text())
    assert sorted(pace) == ["save", "start", "step"]
    assert min(pace["start"], pace["save"]) > 0

    assert job.finish(FINETUNE_END_TIME=str(time.time() + 10)) == 1
    assert f"ERROR launch {job.folder.name}: this job ends in " in job.said()
    start, step, save = (f"{pace[name]:.0f}" for name in ("start", "step", "save"))
    assert f"(start {start}, 2 times step {step} and save {save}, leave 15)" in job.said()
    assert job.events() == ["started", "stopped"]

    assert job.finish(**hour) == 0, job.log.read_text()[-3000:]
    assert job.losses() == undisturbed("tiny-qlora").losses()
    assert job.weights() == undisturbed("tiny-qlora").weights()
