"""A training loss that jumps: a learning rate too high, or rows unlike the others."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

FEWEST, WINDOW = 8, 20
"""Logged losses to know what is usual from, at least and at most."""
DEVIATIONS = 6.0
"""Of a normal distribution, 1 in a billion lies so far out; losses have heavier tails."""
SHARE = 1.3
"""A curve that hardly moves is no reason to call its least move a jump."""


def usual_before_jump(losses: Sequence[float], loss: float) -> float | None:
    """The usual loss, if this one is far above it.

    Median and median deviation: a jump that is not over yet hardly moves them.
    """
    if len(losses) < FEWEST:
        return None
    usual = median(losses)
    spread = 1.4826 * median(abs(value - usual) for value in losses)
    return usual if loss > usual + DEVIATIONS * spread and loss > SHARE * usual else None
