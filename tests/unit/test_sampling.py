"""Batches of rows of like lengths; LengthGroups: whole global ones, another order every epoch."""

from collections import Counter

import numpy as np
import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import TrainerState

from finetune.sampling import GROUPED, LengthGroups, by_length


def test_all_rows_by_length_the_longest_first():
    assert list(by_length([3, 9, 1, 9, 5], 2)) == [[1, 3], [4, 0], [2]]
    assert list(by_length([3, 9], 5)) == [[1, 0]]
    assert list(by_length([], 2)) == []


def drawn(lengths, size, epoch=0, seed=0, grouped=GROUPED):
    sampler = LengthGroups(lengths, size, seed, grouped)
    sampler.set_epoch(epoch)
    rows = list(sampler)
    assert len(rows) == len(sampler)
    return np.array(rows, dtype=int).reshape(-1, size)


def lengths(count, seed=0):
    spread = np.exp(np.random.default_rng(seed).normal(5.2, 0.9, count))
    return np.clip(spread, 20, 2048).astype(int)


@pytest.mark.parametrize("rows", [0, 3, 4, 7, 8, 399, 400, 401, 1000])
def test_an_epoch_is_whole_batches_of_each_row_at_most_once(rows):
    batches = drawn(lengths(rows), 4)
    assert batches.shape == (rows // 4, 4)
    assert max(Counter(batches.ravel().tolist()).values(), default=0) <= 1


def test_batches_hold_rows_of_like_length():
    given = lengths(20_000)

    def padding(batches):
        return 1 - given[batches].sum() / (given[batches].max(1) * batches.shape[1]).sum()

    shuffled = np.random.default_rng(0).permutation(20_000).reshape(-1, 8)
    assert padding(shuffled) > 0.5
    assert padding(drawn(given, 8)) < 0.1
    # micro-batches are cut from a global batch in its order
    assert padding(drawn(given, 32).reshape(-1, 8)) < 0.03


def test_without_grouping_the_batches_are_a_plain_permutation_with_sorted_rows():
    """So a step's gradient is that of a shuffled run, and only its micro-batches differ."""
    given = lengths(2_000)
    batches = drawn(given, 32, grouped=1)
    expected = np.random.default_rng([0, 0]).permutation(2_000)[:1984].reshape(-1, 32)
    assert {frozenset(b) for b in batches.tolist()} == {frozenset(b) for b in expected.tolist()}
    assert (np.diff(given[batches], axis=1) <= 0).all()

    def padding(batches):
        return 1 - given[batches].sum() / (given[batches].max(1) * batches.shape[1]).sum()

    assert padding(batches.reshape(-1, 4)) < 0.25 < 0.4 < padding(expected.reshape(-1, 4))


def test_long_and_short_batches_come_mixed():
    means = lengths(20_000)[drawn(lengths(20_000), 8)].mean(1)
    order = np.arange(len(means))
    assert abs(np.corrcoef(order, means)[0, 1]) < 0.1
    first = means[:GROUPED]
    assert abs(np.corrcoef(order[:GROUPED], first)[0, 1]) < 0.4


def test_a_run_starts_with_its_longest_row_and_later_epochs_do_not():
    given = lengths(2_000)
    starts = [given[drawn(given, 4, epoch, seed)[0]].max() for seed in range(5) for epoch in (0, 1)]
    longest = given.max()
    assert starts[::2] == [longest] * 5
    assert starts[1::2] != [longest] * 5


def test_order_depends_on_seed_and_epoch_alone():
    given = lengths(100)
    one = drawn(given, 4, epoch=1, seed=2).tolist()
    assert drawn(given, 4, epoch=1, seed=2).tolist() == one
    assert drawn(given, 4, epoch=2, seed=2).tolist() != one
    assert drawn(given, 4, epoch=1, seed=3).tolist() != one
    assert drawn(given, 4, epoch=2, seed=1).tolist() != one  # not their sum


def test_a_resumed_epoch_is_the_rest_of_that_epoch():
    """Two ranks; accelerate's loader forgets its sampler when it skips batches."""
    sampler = LengthGroups(lengths(40), 8, seed=0)

    def loader():
        return prepare_data_loader(
            DataLoader(range(40), batch_size=2, sampler=sampler), num_processes=2, process_index=1
        )

    whole = loader()
    whole.set_epoch(3)
    expected = [batch.tolist() for batch in whole]
    resumed = skip_first_batches(loader(), 4)
    sampler.set_epoch(0)  # as in a new process
    sampler.on_epoch_begin(None, TrainerState(global_step=3 * 5 + 2))
    resumed.set_epoch(3)
    assert [batch.tolist() for batch in resumed] == expected[4:]
    assert len(expected) == 10


@pytest.mark.parametrize(("micro", "ranks"), [(4, 2), (2, 4), (1, 8)])
def test_ranks_get_equal_work_in_a_step(micro, ranks):
    """Every second round of micro-batches is dealt from the other end."""
    given, size = lengths(4_000), 4 * micro * ranks
    plain = np.array(list(LengthGroups(given, size, seed=0))).reshape(-1, size)
    dealt = np.array(list(LengthGroups(given, size, 0, micro=micro, ranks=ranks)))
    dealt = dealt.reshape(-1, size)
    assert (np.sort(dealt, axis=1) == np.sort(plain, axis=1)).all()

    def wait(batches):
        """Time of the rank with most padded tokens, over the mean of all ranks."""
        work = given[batches].reshape(len(batches), 4, ranks, micro).max(-1).sum(1)
        return work.max(1).sum() / work.mean(1).sum()

    assert wait(dealt) - 1 < 0.8 * (wait(plain) - 1)
    first = dealt[5].reshape(4, ranks, micro)
    assert (first[0] == plain[5].reshape(4, ranks, micro)[0]).all()
    assert (first[1] == plain[5].reshape(4, ranks, micro)[1, ::-1]).all()
