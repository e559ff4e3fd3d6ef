"""A function over a stream on several processes: in order, in bounded memory, and no hang."""

from __future__ import annotations

import os
import signal

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


@pytest.mark.parametrize("processes", [1, 2])
def test_results_are_in_order(processes) -> None:
    results = list(in_order(work, range(12), processes))
    assert [item for item, _ in results] == list(range(12))
    elsewhere = {pid for _, pid in results} - {os.getpid()}
    assert bool(elsewhere) is (processes == 2)
    here = [item for item, pid in results if pid == os.getpid()]
    assert here == list(range(12 if processes == 1 else parallel.ALONE))


def test_few_items_start_no_process(monkeypatch) -> None:
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", None)
    assert len(list(in_order(work, range(parallel.ALONE), 9))) == parallel.ALONE
    assert list(in_order(work, [], 2)) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_errors_come_through(processes) -> None:
    with pytest.raises(ValueError, match="thirteen"):
        list(in_order(work, range(20), processes))


def test_a_stream_is_read_only_so_far_ahead() -> None:
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
