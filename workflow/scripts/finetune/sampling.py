"""Which rows make a batch, and in which order they come, so that little is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerState

GROUPED = 50
"""Global batches among which rows are sorted by length, where packing was asked for and cannot be.
More would save little padding, and make the rows of a step ever more alike."""


def by_length(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Indices of all rows in batches of up to `size`. The longest come first: memory that does
    not suffice fails at once."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    yield from (order[start : start + size] for start in range(0, len(order), size))


class LengthGroups(Sampler[int], TrainerCallback):
    """Every epoch another permutation, cut to whole global batches.

    Within each, rows are sorted by length: its micro-batches are then of rows of like length, and
    its gradient is the same. With `grouped` above 1 rows are sorted among so many global batches,
    which saves more padding and makes the rows of a step alike.

    Rows of one global batch follow each other, so its rows depend neither on the micro-batch
    nor on the world size. transformers' LengthGroupedSampler ends in a smaller batch, trains
    long batches before short ones, and draws from a generator that no epoch sets anew.

    Micro-batches go to the ranks in turn, so `micro` and `ranks` say which: every second round is
    dealt from the other end. Else the first rank would get the longest of each round, and all
    others would wait for it at the end of the step.

    The rows of a step depend on seed and epoch alone. The epoch is told by the loader, and by the
    Trainer's callback: after a resume accelerate's loader no longer reaches its sampler.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        size: int,
        seed: int,
        grouped: int = 1,
        micro: int = 1,
        ranks: int = 1,
    ) -> None:
        self.lengths, self.micro, self.ranks = np.asarray(lengths), micro, ranks
        self.size, self.seed, self.group, self.epoch = size, seed, grouped * size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_begin(self, args: Any, state: TrainerState, *_: object, **__: object) -> None:
        self.set_epoch(state.global_step // (len(self) // self.size))

    def __len__(self) -> int:
        return len(self.lengths) // self.size * self.size

    def __iter__(self) -> Iterator[int]:
        draw = np.random.default_rng([self.seed, self.epoch])
        rows = draw.permutation(len(self.lengths))[: len(self)]
        starts = range(0, len(rows), self.group)
        groups = [rows[start : start + self.group] for start in starts]
        longest_first = [g[np.argsort(-self.lengths[g], kind="stable")] for g in groups]
        batches = np.concatenate([rows[:0], *longest_first]).reshape(-1, self.size)
        yield from self.dealt(self.in_order(batches, draw)).ravel().tolist()

    def dealt(self, batches: np.ndarray) -> np.ndarray:
        count = self.size // (self.ranks * self.micro)
        rounds = batches.reshape(-1, count, self.ranks, self.micro)
        rounds[:, 1::2] = rounds[:, 1::2, ::-1].copy()
        return rounds

    def in_order(self, batches: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Shuffled, but a run starts with its longest row: memory that does not suffice fails
        in the first step, not after hours."""
        batches = draw.permutation(batches)
        if self.epoch == 0 and len(batches):
            longest = self.lengths[batches].max(axis=1).argmax()
            batches[[0, longest]] = batches[[longest, 0]]
        return batches
