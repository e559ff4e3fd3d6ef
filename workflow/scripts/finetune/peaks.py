"""The memory that a training really used, at its peak, in bytes.

`host`           Anonymous and shared memory of a process, sampled: the kernel keeps no maximum of
                 it. A job is killed for it, since it cannot be dropped. Resident memory counts
                 libraries and mapped weights as well, in each process that maps them, though they
                 exist once and leave when memory is short.
`host_resident`  The kernel's own maximum of resident memory (VmHWM), those files included.
`host_node`      `host` of all ranks of a node, the agent, and where there is one node the launcher:
                 what `mem_mb` must hold.
`gpu_allocated`  The most that PyTorch's caching allocator gave out,
`gpu_reserved`   and took from the device.
`gpu`            The latter, and what the device held beside it: CUDA context, NCCL, workspaces.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import psutil

from finetune.files import read_json, write_json
from finetune.processes import PARENT, several_nodes

SECONDS_BETWEEN_LOOKS = 0.5
GROWN = 1.01
"""Maxima are written when one has grown by so much, and at the end."""


class PeakMemory:
    """Looks at this process's memory from a thread. Where it is a rank, it leaves the maxima in a
    file of `folder`: they outlive a rank that is killed."""

    def __init__(self, folder: Path | None = None) -> None:
        rank = int(os.environ.get("RANK", 0))
        self.path = folder and folder / f"peak_{rank}.json"
        # of a rank; an evaluation has all that it sees
        self.device = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None
        self.node = int(os.environ.get("GROUP_RANK", 0))
        self.above = launchers() if self.device in (0, None) else []
        self.peak: dict[str, int] = {}
        self.written: dict[str, int] = {}
        self.lock = threading.Lock()
        self.ended = threading.Event()

    def __enter__(self) -> PeakMemory:
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.leave(self.look())

    def watch(self) -> None:
        while not self.ended.wait(SECONDS_BETWEEN_LOOKS):
            peak = self.look()
            if any(peak[kind] > GROWN * self.written.get(kind, 0) for kind in peak):
                self.leave(peak)
                self.written = peak

    def leave(self, peak: dict[str, int]) -> None:
        if self.path:
            write_json(self.path, peak)

    def look(self) -> dict[str, int]:
        """The maxima so far, this moment included."""
        now = {"node": self.node} | process_memory(os.getpid()) | gpu_memory(self.device)
        if self.above:
            now["host_above"] = sum(process_memory(pid)["host"] for pid in self.above)
        with self.lock:
            self.peak = highest([self.peak, now])
            return self.peak


def launchers() -> list[int]:
    """The agent and the launcher, where this process has them. On several nodes srun stands between
    the two: an agent's parent is SLURM's, and the launcher is beside one of them."""
    above = psutil.Process().parents()[: 1 if several_nodes() else 2]
    return [process.pid for process in above] if PARENT in os.environ else []


def process_memory(pid: int) -> dict[str, int]:
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        lines = dict(line.split(":", 1) for line in file)
    anonymous, shared, most = (
        int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem", "VmHWM")
    )
    return {"host": anonymous + shared, "host_resident": most}


def gpu_memory(device: int | None) -> dict[str, int]:
    """Of a device, or of the fullest. Nothing before training has begun to use one: to ask would
    start CUDA, on every device."""
    cuda = sys.modules.get("torch.cuda")  # perhaps half imported
    if not getattr(cuda, "is_initialized", lambda: False)():
        return {}
    devices = range(cuda.device_count()) if device is None else [device]
    return highest(device_memory(cuda, one) for one in devices)


def device_memory(cuda: ModuleType, device: int) -> dict[str, int]:
    free, total = cuda.mem_get_info(device)
    beside = total - free - cuda.memory_reserved(device)
    reserved = cuda.max_memory_reserved(device)
    return {
        "gpu": reserved + max(0, beside),
        "gpu_reserved": reserved,
        "gpu_allocated": cuda.max_memory_allocated(device),
    }


def highest(peaks: Iterable[dict[str, int]]) -> dict[str, int]:
    """Kind by kind. What some lack is taken from the others."""
    found: dict[str, int] = {}
    for peak in peaks:
        found |= {kind: max(value, found.get(kind, 0)) for kind, value in peak.items()}
    return found


def of_attempt(ranks: list[dict[str, int]]) -> dict[str, int]:
    """The largest rank, and the host memory of the largest node. Its ranks need not be at their
    peaks at once, so that is what suffices."""
    nodes = Counter()
    for rank in ranks:
        nodes[rank["node"]] += rank["host"] + rank.get("host_above", 0)
    peak = {k: v for k, v in highest(ranks).items() if k not in ("node", "host_above")}
    return peak | {"host_node": max(nodes.values())}


def left_behind(folder: Path) -> dict[str, int]:
    """The peak of an attempt whose ranks have ended, however they did; empty if none got far."""
    ranks = [read_json(path) for path in sorted(folder.glob("peak_*.json"))]
    return of_attempt(ranks) if ranks else {}


def forget(folder: Path) -> None:
    for path in folder.glob("peak_*.json"):
        path.unlink()
