"""Jobs on one machine get devices of their own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from finetune import leases
from finetune.cli import UserError

HOLD = """
import sys, time
from pathlib import Path
from finetune.leases import lease
with lease(int(sys.argv[1]), sys.argv[3].split(","), Path(sys.argv[2])) as ids:
    print(",".join(ids), flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(leases, "SECONDS_BETWEEN_TRIES", 0.01)


def start_holder(folder: Path, count: int, devices: str) -> tuple[subprocess.Popen, list[str]]:
    command = [sys.executable, "-c", HOLD, str(count), str(folder), devices]
    scripts = Path(leases.__file__).parents[1]
    holder = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(scripts)}
    )
    return holder, holder.stdout.readline().strip().split(",")


def test_two_jobs_get_different_devices_and_a_killed_one_frees_its_own(tmp_path: Path) -> None:
    first, held = start_holder(tmp_path, 2, "0,1,GPU-5f")
    try:
        assert held == ["0", "1"]
        with leases.lease(1, ["0", "1", "GPU-5f"], tmp_path) as ids:
            assert ids == ["GPU-5f"]
        assert leases.try_lease(2, ["0", "1", "GPU-5f"], tmp_path, leases.ExitStack()) == []
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    with leases.lease(3, ["0", "1", "GPU-5f"], tmp_path) as ids:
        assert ids == ["0", "1", "GPU-5f"]


def test_a_job_that_cannot_have_all_holds_none(tmp_path: Path) -> None:
    first, _ = start_holder(tmp_path, 1, "0,1")
    try:
        assert leases.try_lease(2, ["0", "1"], tmp_path, leases.ExitStack()) == []
        with leases.lease(1, ["0", "1"], tmp_path) as ids:
            assert ids == ["1"]
    finally:
        first.kill()
        first.wait()


def test_without_gpus_nothing_is_leased(tmp_path: Path) -> None:
    with leases.lease(2, [], tmp_path) as ids:
        assert ids == []
    assert list(tmp_path.iterdir()) == []


def test_in_one_slurm_job_two_jobs_of_snakemake_get_different_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `salloc --gpus=3`, and then `snakemake --cores all --resources gpu=3`."""
    monkeypatch.setattr(leases, "FOLDER", tmp_path / "leases")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with leases.lease(2, ["0", "1", "2"]) as first, leases.lease(1, ["0", "1", "2"]) as second:
        assert (first, second) == (["0", "1"], ["2"])
        assert all(path.exists() for path in leases.lock_paths([*first, *second]))


def test_slurm_jobs_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may have a device of its own that it sees as 0."""
    monkeypatch.setattr(leases, "FOLDER", tmp_path / "leases")
    with leases.ExitStack() as held:
        for job in ("7", "8"):
            monkeypatch.setenv("SLURM_JOB_ID", job)
            assert held.enter_context(leases.lease(1, ["0"], pause=pytest.fail)) == ["0"]


def test_other_users_can_open_the_locks(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    with leases.lease(1, ["0"], folder):
        assert folder.stat().st_mode & 0o7777 == 0o1777
        assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o666}


WORK = """
import os, random, subprocess, sys, time
from pathlib import Path
from finetune import leases
from finetune.leases import LOCKS, lease, lock_paths
leases.SECONDS_BETWEEN_TRIES = 0.01
folder = Path(sys.argv[1])
rank = '''
import fcntl, os, sys, time
from finetune.leases import hold_locks
hold_locks()
for path in sys.argv[1:]:  # what a GPU would notice: two jobs on it at once
    try:
        fcntl.flock(os.open(path, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.open(path + " shared", os.O_CREAT | os.O_RDWR)
print("works", flush=True)
time.sleep(0.5)
'''
with lease(int(sys.argv[2]), [str(i) for i in range(4)], folder / "leases") as ids:
    env = os.environ | {LOCKS: os.pathsep.join(map(str, lock_paths(ids, folder / "leases")))}
    used = [str(folder / f"device-{i}") for i in ids]
    subprocess.run([sys.executable, "-c", rank, *used], env=env)
"""


def start_job(folder: Path, count: int) -> subprocess.Popen:
    scripts = Path(leases.__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", WORK, str(folder), str(count)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(scripts)},
    )


def test_eight_jobs_killed_at_random_never_share_and_never_leak(tmp_path: Path) -> None:
    """The ranks of a job that is killed live on for a moment."""
    draw = random.Random()
    jobs = [start_job(tmp_path, draw.randint(1, 4)) for _ in range(8)]
    for job in draw.sample(jobs, 4):
        assert job.stdout.readline() == "works\n"
        time.sleep(draw.random() / 2)
        job.kill()
    for job in jobs:
        job.communicate(timeout=60)
    assert [path.name for path in tmp_path.glob("* shared")] == []
    with leases.lease(4, ["0", "1", "2", "3"], tmp_path / "leases") as ids:
        assert ids == ["0", "1", "2", "3"]


def test_a_device_is_leased_until_the_last_rank_is_gone(tmp_path: Path) -> None:
    """Its launcher may be gone already: what the GPU holds is not."""
    rank = "from finetune.leases import hold_locks as h; h(); print(1, flush=True); input()"
    scripts = Path(leases.__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(scripts)}
    with leases.lease(1, ["0"], tmp_path):
        env[leases.LOCKS] = str(leases.lock_path(tmp_path, "0"))
        alive = subprocess.Popen(
            [sys.executable, "-c", rank], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        alive.stdout.readline()
    assert leases.try_lease(1, ["0"], tmp_path, leases.ExitStack()) == []
    alive.communicate(b"\n")
    with leases.ExitStack() as held:
        assert leases.try_lease(1, ["0"], tmp_path, held) == ["0"]


def test_these_tests_see_no_gpu_nor_do_the_jobs_they_start() -> None:
    """Only tests/gpu does. On a machine with GPUs all others would assert the wrong things."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert torch.cuda.device_count() == 0


NAMES = ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """seen(count, variables): the devices of a job where PyTorch counts so many."""

    def seen(count: int, **variables: str) -> list[str]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return leases.visible_devices()

    return seen


@pytest.mark.parametrize(
    ("count", "variables", "devices"),
    [
        (2, {}, ["0", "1"]),
        (2, {"CUDA_VISIBLE_DEVICES": "5, GPU-5f"}, ["5", "GPU-5f"]),
        (2, {"SLURM_JOB_GPUS": "4,5"}, ["0", "1"]),
        (2, {"DS_ACCELERATOR": "cpu"}, ["0", "1"]),  # every job's: DeepSpeed must not look for one
        (0, {}, []),
        (0, {"CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_GPUS": "0"}, []),
        (0, {"CUDA_VISIBLE_DEVICES": "-1"}, []),
        (0, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),  # SLURM's word for none
    ],
)
def test_devices_are_those_that_the_job_was_given(seen, count, variables, devices) -> None:
    assert seen(count, **variables) == devices


@pytest.mark.parametrize(
    "variables",
    [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "MIG-41b0"},
        {"SLURM_JOB_GPUS": "3"},
        {"CUDA_VISIBLE_DEVICES": "0", "DS_ACCELERATOR": "cuda"},
    ],
)
@pytest.mark.parametrize(
    ("built", "why"),
    [
        (False, r"it is built without CUDA\. envs/requirements\.txt installs one"),
        (True, r"does `nvidia-smi` list them"),
    ],
)
def test_gpus_that_pytorch_does_not_find_are_no_cpu_job(
    seen, variables, built, why, monkeypatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    name, value = next(iter(variables.items()))
    with pytest.raises(UserError, match=f"{name}={value} gives this job GPUs.*{why}"):
        seen(0, **variables)


NVIDIA_SMI = """#!/bin/sh
[ "$*" = "--query-gpu=index,uuid,memory.used --format=csv,noheader,nounits" ] || exit 2
cat <<END
0, GPU-5f11aa, 40960
1, GPU-77c2bb, 310
2, GPU-90d3cc, 21000
3, GPU-ab04dd, [N/A]
END
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """nvidia_smi(script): what the command is, on a machine with four GPUs."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "bin").mkdir()

    def install(script: str) -> None:
        (tmp_path / "bin" / "nvidia-smi").write_text(script)
        (tmp_path / "bin" / "nvidia-smi").chmod(0o755)

    return install


@pytest.mark.parametrize(
    ("devices", "count", "taken", "told"),
    [
        (["0", "1", "2", "3"], 2, ["1", "3"], []),  # 310 MB are an idle GPU's
        (["3", "2", "1", "0"], 2, ["3", "1"], []),
        (["0", "1", "2", "3"], 3, ["1", "3", "2"], ["2"]),
        (["GPU-5f11aa", "GPU-77c2bb"], 1, ["GPU-77c2bb"], []),
        (["GPU-5f", "GPU-77"], 1, ["GPU-77"], []),  # CUDA takes the beginning of a UUID
        (["MIG-1", "MIG-2"], 1, ["MIG-1"], []),
        (["0"], 1, ["0"], ["0"]),
    ],
)
def test_devices_that_others_use_without_our_locks_come_last_and_are_told(
    nvidia_smi, tmp_path, capsys, devices, count, taken, told
) -> None:
    nvidia_smi(NVIDIA_SMI)
    with leases.lease(count, devices, tmp_path / "leases") as ids:
        assert ids == taken
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in said] == told
    if told == ["0"]:
        assert said == [
            "GPU 0 already holds 42.9 GB of a process that takes no lease: this job may run out of "
            "memory. `nvidia-smi` shows whose it is."
        ]


@pytest.mark.parametrize(
    "script",
    [
        "#!/bin/sh\necho no driver; exit 9\n",
        "#!/bin/sh\necho Failed to initialize NVML\n",
        "#!/nowhere/sh\n",
        "#!/bin/sh\nexec sleep 60\n",
    ],
    ids=["fails", "says something else", "cannot be run", "hangs"],
)
def test_without_an_answer_devices_are_taken_in_their_order(
    nvidia_smi, tmp_path, script, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(leases, "SECONDS_FOR_AN_ANSWER", 0.2)
    nvidia_smi(script)
    with leases.lease(1, ["1", "0"], tmp_path / "leases") as ids:
        assert ids == ["1"]
    assert capsys.readouterr().err == ""
