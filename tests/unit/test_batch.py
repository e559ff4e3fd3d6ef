"""Batch split: exact where it divides, and an error that lists what would divide elsewhere."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from finetune.batch import split_batch

SMALL = st.integers(min_value=1, max_value=64)


@given(SMALL, SMALL, SMALL)
def test_micro_times_accumulation_times_world_size_is_the_batch(micro, steps, world) -> None:
    assert split_batch(micro * steps * world, micro, world) == steps


@given(st.integers(1, 512), SMALL, SMALL)
def test_every_cure_that_an_error_names_works(batch, micro, world) -> None:
    assume(batch % (micro * world))
    with pytest.raises(ValueError, match=r"is not a multiple of") as caught:
        split_batch(batch, micro, world)
    batches, _, micros = str(caught.value).partition("Set ")[2].partition("batch.micro")
    numbers = [int(n) for n in re.findall(r"\d+", batches)]
    assert numbers
    assert all(split_batch(n, micro, world) for n in numbers)
    assert all(split_batch(batch, int(m), world) for m in re.findall(r"\d+", micros))


@given(st.integers(1, 512), SMALL, SMALL)
def test_no_micro_batch_that_would_do_is_left_out(batch, micro, world) -> None:
    assume(batch % (micro * world))
    with pytest.raises(ValueError, match=r"is not a multiple of") as caught:
        split_batch(batch, micro, world)
    named = str(caught.value).partition("batch.micro to one of ")[2]
    fitting = [m for m in range(1, batch + 1) if batch % (m * world) == 0]
    assert [int(m) for m in re.findall(r"\d+", named)] == fitting


@pytest.mark.parametrize(
    ("batch", "micro", "world", "text"),
    [
        (
            10,
            4,
            1,
            "4 x 1 GPUs = 4. Set batch.global to 8 or 12, or batch.micro to one of 1, 2, 5, 10.",
        ),
        (16, 4, 8, "4 x 8 GPUs = 32. Set batch.global to 32, or batch.micro to one of 1, 2."),
        (16, 1, 3, "1 x 3 GPUs = 3. Set batch.global to 15 or 18."),
        (1, 1, 2, "1 x 2 GPUs = 2. Set batch.global to 2."),
        (7, 2, 7, "2 x 7 GPUs = 14. Set batch.global to 14, or batch.micro to one of 1."),
    ],
)
def test_texts(batch, micro, world, text) -> None:
    with pytest.raises(ValueError, match="batch") as caught:
        split_batch(batch, micro, world)
    assert str(caught.value) == f"batch.global {batch} is not a multiple of batch.micro {text}"


@pytest.mark.parametrize("world", [0, -1])
def test_no_gpu_granted(world) -> None:
    with pytest.raises(ValueError, match="granted") as caught:
        split_batch(8, 1, world)
    assert str(caught.value) == (
        "no GPU was granted. Run your command again with `--resources gpu=1`, or more."
    )
