"""The largest micro-batch that fits, and whether activations must be recomputed for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from finetune.batch import micro_batches
from finetune.memory import Job

Auto = Literal["auto"]

MARGIN = 0.9
"""Of what is there, for a micro-batch that nobody chose: a prediction is not a measurement."""
CPU_TOKENS = 1024
"""Tokens a CPU process takes at once, at most. Measured with SmolLM2 (135 M) in two processes of
one thread, rows of up to 69 tokens: QLoRA 44, 75 and 60 tokens a second with 1, 4 and 8 rows;
full ZeRO-3, which gathers all weights for each micro-batch, 12, 24, 41 and 59 with 1, 2, 4, 16."""


def fitted(
    job: Job,
    needs: Callable[[Job], float],
    available: float,
    size: int,
    micro: int | Auto,
    recompute: bool | Auto,
) -> Job:
    """`job` with the micro-batch and checkpointing that suit a global batch of `size` rows; with
    the smallest choice if none fits. `needs` and `available` are bytes of one process.

    Recomputing runs the forward pass twice: a third more work, at any size (Chen et al. 2016,
    arXiv 1604.06174). A smaller micro-batch costs a GPU little, since few thousand tokens keep it
    busy. So what fits without recomputing comes first, down to one row.
    """
    choices = list(candidates(job, size, micro, recompute))
    return next((c for c in choices if needs(c) <= MARGIN * available), choices[-1])


def candidates(job: Job, size: int, micro: int | Auto, recompute: bool | Auto) -> Iterator[Job]:
    """From the fastest to the smallest. Each divides the global batch."""
    for checkpointing in [False, True] if recompute == "auto" else [recompute]:
        for rows in largest_first(job, size) if micro == "auto" else [micro]:
            yield replace(job, micro=rows, checkpointing=checkpointing)


def largest_first(job: Job, size: int) -> list[int]:
    most = max(1, CPU_TOKENS // job.length) if job.cpu else None
    return micro_batches(size // job.world, most)[::-1]
