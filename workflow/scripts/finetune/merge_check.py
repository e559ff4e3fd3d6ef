"""The held-out rows that a merged model is compared on with the one that was trained."""

from __future__ import annotations

from collections.abc import Sequence

MERGE_CHECK_ROWS, MERGE_CHECK_TOKENS = 16, 8_192
"""At most, padding included: logits of all of them are held at once, of two models."""


def rows_compared(lengths: Sequence[int]) -> int:
    """How many of the first rows, by their lengths in tokens. One, however long it is."""
    counts = range(2, min(len(lengths), MERGE_CHECK_ROWS) + 1)
    fitting = (n for n in counts if n * max(lengths[:n]) <= MERGE_CHECK_TOKENS)
    return max(fitting, default=min(1, len(lengths)))


def tokens_compared(longest: int) -> int:
    """The most that they can be, where no row is longer than that."""
    return max(longest, min(MERGE_CHECK_ROWS * longest, MERGE_CHECK_TOKENS))
