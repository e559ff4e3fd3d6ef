"""Jobs on one machine get devices of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from finetune import leases

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


def test_without_gpus_and_under_slurm_nothing_is_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with leases.lease(2, [], tmp_path) as ids:
        assert ids == []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with leases.lease(2, ["0", "1", "2"], tmp_path) as ids:
        assert ids == ["0", "1"]
    assert list(tmp_path.iterdir()) == []


def test_other_users_can_open_the_locks(tmp_path: Path) -> None:
    folder = tmp_path / "leases"
    with leases.lease(1, ["0"], folder):
        assert folder.stat().st_mode & 0o7777 == 0o1777
        assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o666}
