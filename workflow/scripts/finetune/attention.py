"""How attention is computed in training where the config does not say: what is planned is what is
trained."""

from __future__ import annotations

EAGER_UP_TO = 256
"""Tokens of the longest row. Forward and backward of SmolLM2's attention on a CPU take 8 to 12 %
more time with SDPA than without up to 512 tokens, and 9 % less at 1024; the memory of eager
attention grows with the square of the length."""


def longest_row(lint: dict) -> int:
    """Tokens of the longest row that a model sees in training, where it is validated too."""
    return max(lint[split]["longest"] for split in ("train", "validation"))


def default_attention(longest: int, cpu: bool) -> str | None:
    """None leaves the choice to transformers: SDPA where the model has it."""
    return "eager" if cpu and longest <= EAGER_UP_TO else None
