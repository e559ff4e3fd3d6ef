"""Which GPUs of this machine a job may use. Snakemake counts GPUs but does not say which ones
(its issue 281): without this, two jobs of one GPU each would share device 0.

One lock per device, held by the kernel for as long as the job lives, so that a killed job frees
its devices. The launcher and each of its ranks hold it together (a shared lock): a rank that
outlives the launcher by seconds, while its GPU memory is freed, keeps its device.

Under SLURM it is the same among the jobs of Snakemake that run in one SLURM job: a single one where
the executor submits each, several where Snakemake was started inside an allocation.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from finetune.cli import UserError, say

FOLDER = Path("/tmp/finetune-gpu-leases")
"""On this machine's own disk: flock over NFS is unreliable. Shared by all its users. Each SLURM
job has one of its own: what two jobs see as device 0 may be two devices. Its files are empty, and
are left there: to remove a lock that another may just open would give a device to both."""
SECONDS_BETWEEN_TRIES = 1.0
MUCH = 2**30
"""Bytes on a GPU that somebody uses. An idle one holds less, a screen's too."""
SECONDS_FOR_AN_ANSWER = 30.0
LOCKS = "FINETUNE_LOCKS"
"""Environment variable: the locks that ranks hold along with their launcher."""


def visible_devices() -> list[str]:
    """Ids as CUDA_VISIBLE_DEVICES takes them: indices, UUIDs or MIG names. Empty without a GPU."""
    import torch

    count = torch.cuda.device_count()
    if not count and (given := given_devices()):
        why = "does `nvidia-smi` list them on this machine?"
        if not torch.backends.cuda.is_built():
            why = "it is built without CUDA. envs/requirements.txt installs one that has it."
        raise UserError(
            f"{given} gives this job GPUs, and PyTorch {torch.__version__} finds none: {why} "
            "To use the CPU all the same, put DS_ACCELERATOR=cpu before your command."
        )
    if count and (named := os.environ.get("CUDA_VISIBLE_DEVICES")):
        return [name.strip() for name in named.split(",")][:count]
    return [str(index) for index in range(count)]


def given_devices() -> str | None:
    """`VARIABLE=value` that names GPUs for this job. None too where it says that there are none:
    empty, -1, or SLURM's `NoDevFiles`."""
    for variable in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS"):
        if (value := os.environ.get(variable)) is not None:
            return f"{variable}={value}" if re.match(r"\d|GPU-|MIG-", value) else None
    return None


@contextmanager
def lease(
    count: int,
    devices: list[str],
    folder: Path | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[list[str]]:
    """Hold `count` of `devices`, waiting until they are free. Yields their ids. Those come first
    that nobody uses: who works on this machine without this workflow takes no lock."""
    if not devices:
        yield []
        return
    folder, used = folder or folder_here(), used_memory(devices)
    devices = sorted(devices, key=lambda device: used[device] // MUCH)  # of like ones, the first
    with ExitStack() as held:
        started = time.monotonic()
        while not (ids := try_lease(count, devices, folder, held)):
            if time.monotonic() - started < SECONDS_BETWEEN_TRIES:
                say(f"waiting for {count} of the GPUs {', '.join(devices)}: others use them")
            pause(SECONDS_BETWEEN_TRIES)
        tell_of_others(ids)
        yield ids


def used_memory(devices: list[str]) -> dict[str, int]:
    """Bytes in use on each, by whomever. 0 where nvidia-smi does not say: it is not there, the
    device is a part of one (MIG). It starts no CUDA, and numbers GPUs as CUDA does where all are
    of a kind."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.used"]
    command += ["--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_FOR_AN_ANSWER
        )
    except (OSError, subprocess.TimeoutExpired):
        return dict.fromkeys(devices, 0)
    found = re.findall(r"^(\d+), (GPU-\S+), (\d+)$", done.stdout, re.MULTILINE)
    return {
        device: sum(
            int(used) * 2**20
            for index, uuid, used in found
            if device == index or (device.startswith("GPU-") and uuid.startswith(device))
        )
        for device in devices
    }


def tell_of_others(ids: list[str]) -> None:
    for device, used in used_memory(ids).items():
        if used >= MUCH:
            say(
                f"GPU {device} already holds {used / 1e9:.1f} GB of a process that takes no lease: "
                "this job may run out of memory. `nvidia-smi` shows whose it is."
            )


def try_lease(count: int, devices: list[str], folder: Path, held: ExitStack) -> list[str]:
    """All `count` devices, or none: two jobs that each held half would wait for ever.

    A device is free if its lock can be had alone. Whoever looks holds the gate, so that none
    comes between this and the sharing of the lock.
    """
    with open_lock(folder, "gate") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        taken: dict[str, IO] = {}
        for device in devices:
            lock = open_lock(folder, device)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            taken[device] = lock
            if len(taken) == count:
                for lock in taken.values():
                    fcntl.flock(held.enter_context(lock), fcntl.LOCK_SH)
                return list(taken)
        for lock in taken.values():
            lock.close()
        return []


def open_lock(folder: Path, name: str) -> IO:
    """A lock file that every user of the machine can open."""
    if not folder.exists():
        folder.mkdir(exist_ok=True)
        folder.chmod(0o1777)
    path = lock_path(folder, name)
    try:  # to create another user's file is refused in /tmp, even if it is there
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if os.fstat(descriptor).st_uid == os.getuid():
        os.fchmod(descriptor, 0o666)  # the umask took bits away
    return os.fdopen(descriptor, "r+")


def lock_path(folder: Path, name: str) -> Path:
    return folder / name.replace("/", "_")


def folder_here() -> Path:
    job = os.environ.get("SLURM_JOB_ID")
    return FOLDER.with_name(f"{FOLDER.name}-{job}") if job else FOLDER


def lock_paths(devices: list[str], folder: Path | None = None) -> list[Path]:
    """Of leased devices."""
    return [lock_path(folder or folder_here(), device) for device in devices]


def hold_locks() -> None:
    """In a rank: share the locks of the launcher until this process is gone."""
    for path in filter(None, os.environ.get(LOCKS, "").split(os.pathsep)):
        fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_SH)
