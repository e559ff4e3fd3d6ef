"""What goes wrong in a rank: it is found out at once, said once, and costs little."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from survival import EVERY_STEP, Job

BF16, MB = 0.01, 10**6
OUT_OF_MEMORY = """
import torch
if self.args.per_device_train_batch_size > 1 and (rank, step) == (1, 3):
    block = torch.ones(75_000_000)  # 300 MB
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
"""


def errors(job: Job) -> list[str]:
    return [line for line in job.said().splitlines() if line.startswith("ERROR")]


@pytest.mark.parametrize("run", ["tiny-qlora", pytest.param("tiny-full", marks=pytest.mark.slow)])
def test_out_of_memory_goes_on_with_half_the_micro_batch(
    finished: Path, tmp_path: Path, undisturbed, run: str
) -> None:
    job = Job(finished, tmp_path, run, micro_batch=2).with_settings(**EVERY_STEP)
    assert job.finish(fault=OUT_OF_MEMORY) == 0, job.log.read_text()[-3000:]
    said = "rank 1 ran out of memory at step 3 with micro-batch 2; now 1 x 2 accumulated, the same"
    assert said in job.said()
    assert errors(job) == []
    assert job.events() == ["started", "out of memory", "resumed"]
    [event] = [e for e in job.record()["events"] if e["event"] == "out of memory"]
    assert (event["step"], event["micro_batch"], event["next_micro_batch"]) == (2, 2, 1)
    record = job.record()
    assert (record["micro_batch"], record["accumulation"], record["global_batch"]) == (1, 2, 4)
    expected, found = ([x for x in j.lines() if "loss" in x] for j in (undisturbed(run), job))
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    losses = [[line["loss"] for line in lines] for lines in (expected, found)]
    assert losses[1] == pytest.approx(losses[0], rel=BF16)
    assert record["tokens"] == undisturbed(run).record()["tokens"]
    # the peak of the attempt that ran out, though the last one needed far less
    calm = undisturbed(run).record()["peak_memory"]
    assert record["peak_memory"]["host"] == event["peak_memory"]["host"] > calm["host"] + 150 * MB
    assert record["memory"]["node"]["measured"] >= calm["host_node"] + 150 * MB
    [line] = (tmp_path / "calibration.jsonl").read_text().splitlines()
    kinds = record["memory"].items()
    assert json.loads(line)["measured"] == {kind: one["measured"] for kind, one in kinds}
    assert json.loads(line)["micro_batch"] == 2


def test_out_of_memory_with_one_row_says_what_helps(finished: Path, tmp_path: Path) -> None:
    """The CPU allocator's own words, for a tensor of 4 PB."""
    job = Job(finished, tmp_path)
    assert job.finish(fault="import torch\nif rank == 1: torch.empty(2**50)") == 1
    [line] = errors(job)
    assert "rank 1 ran out of memory at step 1 with micro-batch 1, one row at a time" in line
    assert "Try, in this order: `gradient_checkpointing: true`, a shorter max_length." in line
    assert job.events() == ["started", "failed"]


def test_the_first_rank_that_fails_says_why_once(finished: Path, tmp_path: Path) -> None:
    job = Job(finished, tmp_path)
    assert job.finish(fault='if (rank, step) == (1, 2): raise KeyError("the cause")') == 1
    said = f"ERROR train {job.folder.name}: KeyError: 'the cause' (see the log of this job)"
    assert errors(job) == [said]
    assert "ChildFailedError" not in job.said() + job.log.read_text()
    assert 'raise KeyError("the cause")' in job.log.read_text()


def test_a_rank_that_is_killed_takes_the_others_along(finished: Path, tmp_path: Path) -> None:
    job = Job(finished, tmp_path, log_every=1)
    fault = "if (rank, step) == (1, 2): os.kill(os.getpid(), 9)"
    job.start(fault=fault)
    job.wait_for_step(1)
    started = time.monotonic()
    assert job.process.wait(timeout=60) == 1
    assert time.monotonic() - started < 15
    [line] = errors(job)
    assert "rank 1 was killed by SIGKILL. Host memory ran out, mostly" in line


def test_a_rank_that_hangs_shows_where_every_rank_stands(finished: Path, tmp_path: Path) -> None:
    job = Job(finished, tmp_path).with_settings(timeout_minutes=0.2)
    fault = "if (rank, step) == (1, 2): time.sleep(1000)"
    assert job.finish(fault=fault) == 1
    [line] = errors(job)
    assert "nothing moved for 0.2 minutes after step 1" in line
    log = job.log.read_text()
    assert all(f"where rank {rank} (process" in log for rank in (0, 1))
    assert log.count("Current thread") + log.count("Thread 0x") >= 2
    assert "in fault" in log  # where rank 1 hangs


def gone(processes: list[psutil.Process], seconds: float = 5) -> bool:
    return not psutil.wait_procs(processes, timeout=seconds)[1]


@pytest.mark.parametrize("victim", ["launcher", pytest.param("agent", marks=pytest.mark.slow)])
def test_no_process_outlives_its_parent(finished: Path, tmp_path: Path, victim: str) -> None:
    job = Job(finished, tmp_path, log_every=1)
    job.start(fault="time.sleep(0.5 if step < 4 else 60)")
    job.wait_for_step(2)
    processes = job.processes()
    assert len(processes) == 4
    processes[victim == "agent"].send_signal(signal.SIGKILL)
    assert gone(processes[1:])
    job.process.wait(timeout=10)
    assert job.finish() == 0
    first = "killed" if victim == "launcher" else "failed"
    assert job.events() == ["started", first, "started"]
    assert job.record()["events"][1]["peak_memory"]["host_node"] > 100 * MB


def test_a_second_launch_of_a_run_is_refused_and_harms_nothing(
    finished: Path, tmp_path: Path
) -> None:
    job = Job(finished, tmp_path, log_every=1, steps=4)
    job.start(fault="time.sleep(1)")
    job.wait_for_step(1)
    second = Job(finished, tmp_path, steps=4)
    first = job.process
    os.rename(tmp_path / "said", tmp_path / "first said")
    assert second.finish() == 1
    assert "another launch of this run is alive" in second.said()
    assert first.wait(timeout=120) == 0


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet(finished: Path, tmp_path: Path) -> None:
    jobs = [Job(finished, tmp_path / name, steps=2) for name in ("one", "two")]
    for job in jobs:
        job.start()
    assert [job.process.wait(timeout=240) for job in jobs] == [0, 0]
