"""Batches that are evaluated in halves where memory does not suffice for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from finetune.cli import UserError, say
from finetune.out_of_memory import is_out_of_memory

T = TypeVar("T")


def in_halves(work: Callable[[list[int]], T], rows: list[int]) -> Iterator[tuple[list[int], T]]:
    """`work` of all `rows` at once, or of as many as it has memory for: those, and what it made of
    them. A day of training must not end in an evaluation that asks for one row too many."""
    try:
        yield rows, work(rows)
        return
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if len(rows) == 1:
            more = "give the job more memory (on a cluster, mem_mb in the profile)"
            more = "set evaluation.gpus higher" if torch.cuda.is_available() else more
            raise UserError(
                f"memory does not suffice for the model and one row: {error}. Set max_length lower "
                "under the dataset or, where answers are written, evaluation.max_new_tokens. Or "
                f"{more}."
            ) from error
    # no earlier: the error holds what the failed attempt had made
    torch.cuda.empty_cache()
    half = len(rows) // 2
    say(f"memory does not suffice for {len(rows)} rows at once; with {half} it goes on")
    for part in (rows[:half], rows[half:]):
        yield from in_halves(work, part)
