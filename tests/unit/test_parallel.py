"""A function over a stream on several processes: in order, in bounded memory, and no hang."""

from __future__ import annotations

import os
import signal
import time

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


def test_killed_worker_is_an_error_and_no_hang(monkeypatch) -> None:
    monkeypatch.setattr(parallel, "ALONE", 0)
    with pytest.raises(UserError) as caught:
        list(in_order(die, range(20), 2))
    assert str(caught.value) == (
        "a worker process died, most likely for want of memory (else the log says why). Give the "
        "job more (mem_mb) or fewer threads."
    )
