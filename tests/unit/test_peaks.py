"""What memory a rank used, kept over ranks, attempts and kills."""

import json
import mmap
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from finetune import peaks
from finetune.peaks import PeakMemory, forget, gpu_memory, highest, left_behind, process_memory
from finetune.training_record import compared

MB = 2**20


def test_memory_of_files_is_resident_and_no_demand(tmp_path):
    """What a mapped weight file takes leaves when memory is short: no request has to hold it."""
    (tmp_path / "weights").write_bytes(os.urandom(64 * MB))
    before = process_memory(os.getpid())
    with open(tmp_path / "weights", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert sum(mapped[:: mmap.PAGESIZE]) > 0  # every page is touched
        after = process_memory(os.getpid())
        mapped.close()
    assert abs(after["host"] - before["host"]) < 16 * MB
    assert after["host_resident"] >= after["host"]


def test_a_peak_between_two_looks_at_the_end_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(peaks, "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setenv("RANK", "3")
    with PeakMemory(tmp_path) as memory:
        before = memory.look()["host"]
        block = np.ones(128 * MB, dtype=np.uint8)
        for _ in range(3000):  # the thread sees it
            if memory.peak["host"] >= before + 100 * MB:
                break
            time.sleep(0.01)
        del block
    assert process_memory(os.getpid())["host"] < before + 64 * MB
    written = json.loads((tmp_path / "peak_3.json").read_text())
    assert written == memory.peak
    assert written["host"] >= before + 100 * MB
    assert "gpu" not in written


def test_a_rank_that_is_killed_leaves_its_peak(tmp_path):
    """As the kernel does when memory runs out: nothing of the process runs after it."""
    code = (
        "import pathlib, sys, time; from finetune.peaks import PeakMemory\n"
        "with PeakMemory(pathlib.Path(sys.argv[1])):\n"
        "    block = b'x' * (200 << 20); time.sleep(60)\n"
    )
    path = os.pathsep.join(sys.path)
    rank = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"PYTHONPATH": path}
    )
    file = tmp_path / "peak_0.json"
    while not (file.exists() and json.loads(file.read_text())["host"] > 200 * MB):
        assert rank.poll() is None
        time.sleep(0.05)
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    assert left_behind(tmp_path)["host_node"] > 200 * MB


@pytest.mark.parametrize(("nodes", "known"), [(1, 2), (2, 1)])
def test_on_several_nodes_the_parent_of_an_agent_is_not_ours(nodes, known, monkeypatch):
    """It is SLURM's (slurmstepd); on one node it is the launcher."""
    monkeypatch.setenv("FINETUNE_PARENT", str(os.getppid()))
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
    agent = psutil.Process(os.getppid())
    assert peaks.launchers() == [agent.pid, agent.ppid()][:known]


def test_ranks_add_up_on_the_host_and_not_on_the_gpu(tmp_path):
    assert left_behind(tmp_path) == {}
    ranks = [
        {"node": 0, "host": 5, "host_resident": 8, "host_above": 2},
        {"node": 0, "host": 7, "host_resident": 7, "gpu": 4},
        {"node": 1, "host": 9, "host_resident": 9, "host_above": 1, "gpu": 3},
    ]
    for rank, peak in enumerate(ranks):
        (tmp_path / f"peak_{rank}.json").write_text(json.dumps(peak))
    expected = {"host": 9, "host_resident": 9, "gpu": 4, "host_node": 5 + 7 + 2}
    assert left_behind(tmp_path) == expected
    forget(tmp_path)
    assert left_behind(tmp_path) == {}


def test_the_highest_of_attempts_that_measured_different_things():
    assert highest([{}, {"gpu": 9, "host": 1}, {"host": 3}]) == {"gpu": 9, "host": 3}
    assert highest([]) == {}


class Cuda:
    """torch.cuda of a device of 100 bytes, on which others than the allocator hold 15."""

    def __init__(self):
        self.started = False

    def is_initialized(self):
        return self.started

    def device_count(self):
        return 2

    def mem_get_info(self, device):
        return 100 - 40 - 15 - device, 100

    def memory_reserved(self, device):
        return 40

    def max_memory_reserved(self, device):
        return 60

    def max_memory_allocated(self, device):
        return 50 + device


def test_a_gpu_held_what_the_allocator_took_at_its_peak_and_what_is_beside_it(monkeypatch):
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    assert gpu_memory(0) == {}  # to ask earlier would start CUDA
    cuda.started = True
    assert gpu_memory(0) == {"gpu": 60 + 15, "gpu_reserved": 60, "gpu_allocated": 50}


@pytest.mark.parametrize(("rank", "allocated"), [("0", 50), ("1", 51), (None, 51)])
def test_a_rank_looks_at_its_gpu_and_an_evaluation_at_all(monkeypatch, rank, allocated):
    """Its model may be spread over several, of which the fullest counts."""
    cuda = Cuda()
    cuda.started = True
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert PeakMemory().look()["gpu_allocated"] == allocated


PLANNED = {
    "total": 10,
    "host": {"train": 20},
    "cpu": False,
    "calibration": {"process": {"corrected": 12}, "node": None},
}


def test_predicted_and_measured_stand_side_by_side():
    assert compared(PLANNED, {"gpu": 11, "host": 4, "host_node": 9}) == {
        "process": {"predicted": 10, "corrected": 12, "measured": 11},
        "node": {"predicted": 20, "corrected": None, "measured": 9},
    }


@pytest.mark.parametrize(("cpu", "measured"), [(True, 4), (False, None)])
def test_without_a_gpu_the_process_is_on_the_host_if_that_was_planned(cpu, measured):
    found = compared(PLANNED | {"cpu": cpu}, {"host": 4, "host_node": 9})
    assert found["process"]["measured"] == measured
