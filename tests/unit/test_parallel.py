"""A function over a stream on several processes: in order, in bounded memory, and no hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune import parallel
from finetune.cli import UserError
from finetune.parallel import in_order


def work(item: int) -> tuple[int, int]:
    if item == 13:
        raise ValueError("thirteen")
    return item, os.getpid()


def die(item: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def slow(item: int) -> tuple[int, int]:
    time.sleep(0.02)
    return work(item)


@pytest.mark.parametrize(("processes", "alone"), [(1, 0), (2, 0), (2, 0.05)])
def test_results_are_in_order(processes, alone, monkeypatch) -> None:
    monkeypatch.setattr(parallel, "ALONE", alone)
    results = list(in_order(slow, range(12), processes))
    assert [item for item, _ in results] == list(range(12))
    here = [item for item, pid in results if pid == os.getpid()]
    assert here == list(range(len(here)))  # the first ones
    assert (len(here) == 12) is (processes == 1)
    assert (len(here) > 0) is (processes == 1 or alone > 0)


def test_little_work_starts_no_process(monkeypatch) -> None:
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", None)
    assert len(list(in_order(work, range(5), 9))) == 5
    assert list(in_order(work, [], 2)) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_errors_come_through(processes, monkeypatch) -> None:
    monkeypatch.setattr(parallel, "ALONE", 0)
    with pytest.raises(ValueError, match="thirteen"):
        list(in_order(work, range(20), processes))


def test_a_stream_is_read_only_so_far_ahead(monkeypatch) -> None:
    monkeypatch.setattr(parallel, "ALONE", 0)
    read = []
    items = (read.append(n) or n for n in range(100))
    results = in_order(work, (n + 20 for n in items), 2)
    for done in range(1, 9):
        next(results)
        assert len(read) <= done + parallel.AHEAD * 2 + 1
    results.close()  # and stops when nobody wants more
    assert len(read) < 20


ENDS_EARLY = """
import multiprocessing.connection
import time

from finetune import parallel

real = multiprocessing.connection.wait


def late(objects, timeout=None):
    ready = real(objects, timeout)
    time.sleep(0.2)  # the machine is busy
    return ready


def items():
    yield from range(3)
    time.sleep(2)  # all are done
    yield 4
    raise ValueError("a bad row")


if __name__ == "__main__":
    parallel.ALONE = 0
    multiprocessing.connection.wait = late
    try:
        list(parallel.in_order(abs, items(), 2))
    except ValueError as error:
        print(error)
"""


def test_a_stream_that_ends_in_an_error_is_no_hang(tmp_path) -> None:
    """Work that was given just before is withdrawn: the pool's own thread may not have seen it."""
    script = tmp_path / "ends_early.py"
    script.write_text(ENDS_EARLY)
    env = os.environ | {"PYTHONPATH": str(Path(parallel.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "a bad row\n", done.stderr


def test_killed_worker_is_an_error_and_no_hang(monkeypatch) -> None:
    monkeypatch.setattr(parallel, "ALONE", 0)
    with pytest.raises(UserError) as caught:
        list(in_order(die, range(20), 2))
    assert str(caught.value) == (
        "a worker process died, most likely for want of memory (else the log says why). Give the "
        "job more (mem_mb) or fewer threads."
    )


def test_killed_parent_leaves_no_workers() -> None:
    code = "import test_parallel; test_parallel.print_workers()"
    command = [sys.executable, "-c", code]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    until = time.monotonic() + 20
    while any(map(runs, workers)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(runs, workers))


def print_workers() -> None:
    """Both have run, and the stream goes on for ever."""
    parallel.ALONE = 0
    seen = set()
    for _, pid in in_order(slow, (n + 20 for n in range(10**9)), 2):
        if pid not in seen:
            print(pid, flush=True)
        seen.add(pid)


def runs(pid: int) -> bool:
    """Not gone, nor waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
