"""A function over a stream of items, on several processes, in order and in bounded memory."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TypeVar

from finetune.cli import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 3
"""Items that wait for each process. A pool's own `map` would read the whole stream at once."""
ALONE = 4
"""Items done here before processes are started, which takes longer than a few items do."""


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int
) -> Iterator[Result]:
    """The results, in the order of the items."""
    items = iter(items)
    yield from map(function, islice(items, None if processes < 2 else ALONE))
    if (first := next(items, None)) is None:
        return
    # spawned: a fork would copy the threads' locks of Arrow and tokenizers in any state
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from windowed(pool, function, first, items, AHEAD * processes)


def windowed(
    pool: Executor,
    function: Callable[[Item], Result],
    first: Item,
    rest: Iterator[Item],
    size: int,
) -> Iterator[Result]:
    waiting = deque([pool.submit(function, first)])
    try:
        for item in rest:
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
        for future in waiting:
            future.cancel()
