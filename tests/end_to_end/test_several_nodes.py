"""Two nodes, played by two agents on this machine: what one node can, they can."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from survival import EVERY_STEP, STEPS, Job

FAKE = Path(__file__).resolve().parents[1] / "fake_slurm"


class TwoNodes(Job):
    """One process on each."""

    def start(self, **options: object):
        self.plan["settings"]["nodes"] = 2
        path = f"{FAKE}{os.pathsep}{os.environ['PATH']}"
        return super().start(threads=1, **options, PATH=path, SLURM_JOB_ID="1")


@pytest.mark.parametrize("run", ["tiny-qlora", pytest.param("tiny-full", marks=pytest.mark.slow)])
def test_a_run_on_two_nodes_is_that_on_one(
    finished: Path, tmp_path: Path, undisturbed, run: str
) -> None:
    """Stopped by SLURM, which signals the ranks of both and not the launcher, and gone on with."""
    job = TwoNodes(finished, tmp_path, run)
    job.start(fault="time.sleep(0.1)")
    job.wait_for_step(1)
    ranks = job.ranks()
    assert len({rank.parent().pid for rank in ranks}) == len(ranks) == 2
    for process in {rank.parent() for rank in ranks} | set(ranks):
        process.send_signal(signal.SIGTERM)
    assert job.process.wait(timeout=60) == 75, job.log.read_text()[-3000:]
    assert job.finish() == 0, job.log.read_text()[-3000:]
    assert job.losses() == undisturbed(run).losses()
    assert job.weights() == undisturbed(run).weights()
    assert job.events() == ["started", "stopped", "resumed"]
    record = job.record()
    assert (record["world_size"], record["steps"]) == (2, STEPS)
    assert not job.state.exists()


OUT_OF_MEMORY = """
import torch
if self.args.per_device_train_batch_size > 1 and (rank, step) == (1, 3):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
"""


@pytest.mark.slow
def test_memory_that_runs_out_on_one_node_shrinks_the_micro_batch_on_all(
    finished: Path, tmp_path: Path, undisturbed
) -> None:
    job = TwoNodes(finished, tmp_path, micro_batch=2).with_settings(**EVERY_STEP)
    assert job.finish(fault=OUT_OF_MEMORY) == 0, job.log.read_text()[-3000:]
    assert "rank 1 ran out of memory at step 3 with micro-batch 2; now 1 x 2" in job.said()
    assert job.events() == ["started", "out of memory", "resumed"]
    assert job.record()["tokens"] == undisturbed("tiny-qlora").record()["tokens"]


@pytest.mark.slow
def test_a_hang_shows_where_the_ranks_of_both_nodes_stand(finished: Path, tmp_path: Path) -> None:
    job = TwoNodes(finished, tmp_path).with_settings(timeout_minutes=0.2)
    assert job.finish(fault="if (rank, step) == (1, 2): time.sleep(1000)") == 1
    [line] = [line for line in job.said().splitlines() if line.startswith("ERROR")]
    assert "nothing moved for 0.2 minutes after step 1" in line
    assert all(f"where rank {rank} (process" in job.log.read_text() for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launch.py", "srun", "agent.py"])
def test_no_process_on_any_node_outlives_what_started_it(
    finished: Path, tmp_path: Path, victim: str
) -> None:
    job = TwoNodes(finished, tmp_path, log_every=1)
    job.start(fault="time.sleep(0.5)")
    job.wait_for_step(2)
    processes = job.processes()
    assert len(processes) == 6  # launcher, srun, and an agent and a rank on each node
    next(p for p in processes if victim in " ".join(p.cmdline()[:2])).kill()
    assert not psutil.wait_procs(processes[1:], timeout=5)[1]
    assert job.process.wait(timeout=90) != 0
    assert job.finish() == 0
    first = "killed" if victim == "launch.py" else "failed"
    assert job.events() == ["started", first, "started"]
