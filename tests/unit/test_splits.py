"""Splits: the same row always lands in the same one, whatever comes along with it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune import splits
from finetune.splits import SPLITS, choose_split

KEYS = st.text() | st.text(alphabet=st.characters(categories=["Cs"]), min_size=1)
SHARES = st.floats(0, 0.49)
ROWS = [f"row {n}" for n in range(10_000)]


def test_split_of_some_keys_never_changes() -> None:
    """Changing these would move rows of finished projects between training and test."""
    drawn = {n: choose_split(row, 451, 0.1, 0.15) for n, row in enumerate(ROWS[:40])}
    assert [n for n, split in drawn.items() if split == "validation"] == [4, 17, 19, 21, 23, 31]
    assert [n for n, split in drawn.items() if split == "test"] == [5, 8, 20, 36]


@given(KEYS, st.integers(), SHARES, SHARES)
def test_split_is_a_function_of_its_arguments(key, seed, validation, test) -> None:
    first = choose_split(key, seed, validation, test)
    assert first in SPLITS
    assert choose_split(key, seed, validation, test) == first


@given(KEYS, st.integers(0, 99), SHARES, SHARES, st.floats(0, 0.5))
def test_larger_validation_share_never_moves_a_test_row(key, seed, small, test, more) -> None:
    before = choose_split(key, seed, small, test)
    after = choose_split(key, seed, min(small + more, 0.5), test)
    assert (before == "test") == (after == "test")
    if before == "validation":
        assert after == "validation"


@given(KEYS, st.integers(0, 99), SHARES, SHARES, st.floats(0, 0.5))
def test_larger_test_share_never_takes_validation_rows(key, seed, validation, small, more) -> None:
    before = choose_split(key, seed, validation, small)
    after = choose_split(key, seed, validation, min(small + more, 0.5))
    assert (before == "validation") == (after == "validation")
    if before == "test":
        assert after == "test"


@given(KEYS, st.integers(0, 99))
def test_share_of_zero_gives_nothing(key, seed) -> None:
    assert choose_split(key, seed, 0, 0) == "train"
    assert choose_split(key, seed, 0.5, 0) != "test"
    assert choose_split(key, seed, 0, 0.5) != "validation"


@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_the_ends_of_the_range_are_inside_it(byte, monkeypatch) -> None:
    """2**64 - 1 over 2**64 is 1.0 as a float, which would be a validation row of no share."""
    digest = type("Digest", (), {"digest": lambda self: byte * 32})
    monkeypatch.setattr(splits.hashlib, "sha256", lambda text: digest())
    assert choose_split("x", 0, 0, 0) == "train"


@pytest.mark.parametrize("seed", [0, 1, 451])
@pytest.mark.parametrize(("validation", "test"), [(0.05, 0.1), (0.3, 0.3), (0.01, 0.5), (0, 0.2)])
def test_shares_are_what_was_asked_for(validation, test, seed) -> None:
    """Within four standard deviations of 10,000 draws."""
    counts = Counter(choose_split(key, seed, validation, test) for key in ROWS)
    for name, share in (("validation", validation), ("test", test)):
        spread = (share * (1 - share) * len(ROWS)) ** 0.5
        assert abs(counts[name] - share * len(ROWS)) <= 4 * spread


def test_seeds_draw_independently() -> None:
    """Of two draws of 20 % of the rows, about 4 % are in both."""
    first, second = (
        {key for key in ROWS if choose_split(key, seed, 0, 0.2) == "test"} for seed in (1, 2)
    )
    assert 300 < len(first & second) < 500
