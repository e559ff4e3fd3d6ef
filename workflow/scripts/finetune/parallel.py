"""A function over a stream of items, on several processes, in order and in bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from typing import TypeVar

from finetune.cli import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 3
"""Items that wait for each process. A pool's own `map` would read the whole stream at once."""
ALONE = 2.0
"""Seconds of work done here before processes are started, which takes as long."""


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int
) -> Iterator[Result]:
    """The results, in the order of the items."""
    items, started = iter(items), time.monotonic()
    for item in items:
        if processes > 1 and time.monotonic() - started >= ALONE:
            break
        yield function(item)
    else:
        return
    # spawned: a fork would copy the threads' locks of Arrow and tokenizers in any state
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, end_with_parent) as pool:
        yield from windowed(pool, function, chain([item], items), AHEAD * processes)


def end_with_parent() -> None:
    """A worker waits for work. If nobody is left to give it any, it would wait for ever."""
    threading.Thread(target=wait_and_exit, daemon=True).start()


def wait_and_exit() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def windowed(
    pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], size: int
) -> Iterator[Result]:
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > size:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process died, most likely for want of memory (else the log says why). Give "
            "the job more (mem_mb) or fewer threads."
        ) from None
    finally:  # the reader may have had enough
        # not by Future.cancel: until 3.11.3 a pool with nothing but such futures never ends
        pool.shutdown(cancel_futures=True)
