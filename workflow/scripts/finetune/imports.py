"""Imports of the large libraries, quicker and in less memory."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PYTHONS = gc.get_threshold()
OBJECTS = 50_000
"""Made between two collections of garbage. Python's own number is 700."""


def collect_rarely() -> None:
    """torch and transformers make half a million objects that stay. To look through those again
    and again for garbage takes a quarter of the time of importing them."""
    gc.set_threshold(OBJECTS, *PYTHONS[1:])


@contextmanager
def in_rank() -> Iterator[None]:
    """What a rank imports within is never looked through. From then on garbage is collected as
    often as Python does: it may hold tensors.

    bitsandbytes gives four functions to torch.compile when it is imported, which takes the whole
    compiler: 46 MB and half a second in each rank. Only its 8-bit optimizers on a CPU ever call
    one. Within, a function is compiled when it is first called.
    """
    import torch

    now = torch.compile
    gc.disable()
    torch.compile = functools.partial(compile_later, now)
    try:
        yield
    finally:
        torch.compile = now
        gc.freeze()
        gc.set_threshold(*PYTHONS)
        gc.enable()


def compile_later(now: Callable, function: Callable | None = None, **options: Any) -> Callable:
    """torch.compile, `now`, of a function or as a decorator, that waits for the first call."""
    if function is None:
        return functools.partial(compile_later, now, **options)
    compiled = functools.cache(lambda: now(function, **options))
    return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))
