"""What training has: the memory of a GPU, or of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from finetune.gpu_models import GPU_MODELS

GB = 1e9


@dataclass(frozen=True)
class Device:
    """`available` bytes: of one GPU, or of a whole machine whose CPU processes share it. `name`
    says where the figure is from."""

    available: float
    name: str
    cpu: bool = False


def find_device(settings: dict) -> Device:
    """What the settings say, else the GPU that is seen here, else this machine's memory."""
    if settings["gpu_memory_gb"]:
        return Device(settings["gpu_memory_gb"] * GB, "gpu_memory_gb")
    if model := settings["gpu_model"]:
        return Device(GPU_MODELS[model] * 2**30, f"gpu_model {model}")
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return Device(device.total_memory, device.name)
    memory = machine_memory()
    return Device(memory, f"no GPU seen: CPU processes share {memory / GB:.1f} GB", cpu=True)


def machine_memory() -> int:
    """Bytes this job may use. What SLURM grants to the job that plans is not what training gets:
    that is asked for by this very plan, so there the machine's own memory counts."""
    total = psutil.virtual_memory().total
    return total if "SLURM_JOB_ID" in os.environ else min(total, cgroup_limit() or total)


def cgroup_limit(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int | None:
    """The smallest limit of this process's control groups (v2), or None without one."""
    lines = own.read_text().splitlines() if own.exists() else []
    name = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    folder = root / name
    limits = []
    for group in (folder, *folder.parents):
        file = group / "memory.max"
        if file.exists() and (text := file.read_text().strip()) != "max":
            limits.append(int(text))
        if group == root:
            break
    return min(limits, default=None)
