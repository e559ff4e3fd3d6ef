"""The first rank that fails tells why, once; what other ranks say after it is an echo."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from finetune.cli import UserError, complain, describe
from finetune.out_of_memory import is_out_of_memory
from finetune.outcome import claim

ECHO = 3.0
"""Seconds in which the agent notices a dead rank and ends this one. What fails here meanwhile is
mostly a connection to that rank."""


@dataclass
class Place:
    """How far this rank is."""

    step: int = 0


@contextmanager
def told(folder: Path) -> Iterator[Place]:
    """End this rank, and so the others, at the first error. At once: to take the interpreter down
    can hang in a collective that waits for the others."""
    place = Place()
    try:
        yield place
    except Exception as error:
        tell(folder, error, place.step)
        leave(1)


def tell(folder: Path, error: Exception, step: int) -> None:
    text, kind = describe(error), "oom" if is_out_of_memory(error) else "error"
    if not isinstance(error, UserError) or error.__cause__:
        traceback.print_exc()
        time.sleep(0 if kind == "oom" else ECHO)
    rank = int(os.environ.get("RANK", 0))
    first = claim(folder, kind, rank=rank, step=step, text=text)
    if first and kind == "error":  # after `oom` the launcher may start again, and speaks
        complain(text)
    else:
        print(f"ERROR rank {rank}: {text}", file=sys.stderr)


def leave(code: int) -> NoReturn:
    """End this process with all files written, and without taking the interpreter down.

    torch and DeepSpeed keep gloo's process groups, and so their threads, after the groups are
    destroyed. A thread that wants the GIL while the interpreter goes down is ended by force,
    which C++ answers with an abort (SIGABRT, "terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
