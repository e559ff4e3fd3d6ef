"""Best-fit decreasing and the packs it makes: nothing lost, nothing twice, nothing over."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune import packing
from finetune.encoding import IGNORED
from finetune.packing import (
    best_fit_decreasing,
    packed_batches,
    packing_efficiency,
    padding_share,
)

CAPACITY = 40
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=80).map(np.array)


def naive(lengths, capacity):
    """Fill of each pack, found by looking at every pack."""
    fills = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, fill in enumerate(fills) if fill + length <= capacity]
        if fitting:
            fills[max(fitting, key=fills.__getitem__)] += length
        else:
            fills.append(length)
    return fills


@given(LENGTHS)
def test_packs_are_those_of_a_search_through_all(lengths):
    packs = best_fit_decreasing(lengths, CAPACITY)
    fills = np.bincount(packs, weights=lengths)
    assert sorted(fills) == sorted(naive(lengths.tolist(), CAPACITY))
    assert fills.max() <= CAPACITY
    assert fills.min() >= 1  # no number is skipped
    assert sum(sorted(fills)[:2]) > CAPACITY or len(fills) == 1  # no two would fit in one


@given(LENGTHS)
def test_packs_are_always_the_same(lengths):
    first, second = (best_fit_decreasing(lengths, CAPACITY).tolist() for _ in range(2))
    assert first == second


def test_a_full_scale_packing_wastes_little():
    lengths = np.random.default_rng(1).integers(20, 2001, 50_000)
    packs = best_fit_decreasing(lengths, 8192)
    fills = np.bincount(packs, weights=lengths)
    assert fills.max() <= 8192
    assert packing_efficiency(lengths, len(fills), 8192) > 0.999


@pytest.mark.parametrize("lengths", [[3, 41], [0, 3]])
def test_a_row_that_no_pack_can_hold_is_an_error(lengths):
    with pytest.raises(ValueError, match="packs of 40"):
        best_fit_decreasing(np.array(lengths), CAPACITY)


def examples(lengths, chunk):
    """A table in chunks, as datasets writes it. Every token is unlike all others."""
    rows, token = [], 0
    for index, length in enumerate(lengths):
        ids = list(range(token, token + length))
        labels = [i if i % 3 else IGNORED for i in ids]
        row = {"id": f"a.jsonl:{index}", "input_ids": ids, "labels": labels, "length": length}
        rows.append(row | {"row": index})
        token += length
    pieces = [rows[i : i + chunk] for i in range(0, len(rows), chunk)]
    return pa.concat_tables([pa.Table.from_pylist(piece, SCHEMA) for piece in pieces])


TOKENS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    {"id": pa.string(), "input_ids": TOKENS, "labels": TOKENS, "length": pa.int32()}
    | {"row": pa.int64()}
)


def unpack(packs):
    """id -> (input_ids, labels), cut by `lengths`."""
    found = {}
    for pack in packs:
        ends = np.cumsum(pack["lengths"])
        for name, end, length in zip(pack["id"].split(", "), ends, pack["lengths"], strict=True):
            assert name not in found
            found[name] = (
                pack["input_ids"][end - length : end],
                pack["labels"][end - length : end],
            )
    return found


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("batch_tokens", [1, 100, 4_000_000])
@given(lengths=LENGTHS)
def test_every_token_comes_once_and_is_supervised_as_before(chunk, batch_tokens, lengths):
    lengths = lengths.tolist()
    table = examples(lengths, chunk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BATCH_TOKENS", batch_tokens)
        packs = [pack for b in packed_batches(table, CAPACITY) for pack in b.to_pylist()]
    expected = {
        row["id"]: (row["input_ids"], [IGNORED, *row["labels"][1:]]) for row in table.to_pylist()
    }
    assert unpack(packs) == expected
    assert sorted(pack["length"] for pack in packs) == sorted(naive(lengths, CAPACITY))
    for pack in packs:
        assert pack["length"] == len(pack["input_ids"]) == len(pack["labels"])
        numbers = [int(name.split(":")[1]) for name in pack["id"].split(", ")]
        assert numbers == sorted(numbers)


def test_a_slice_of_a_table_is_packed_and_the_table_stays_as_it_was():
    table = examples([5, 4, 3, 2, 9], 2)
    before = table.to_pylist()
    packs = [pack for b in packed_batches(table.slice(1, 3), 6) for pack in b.to_pylist()]
    assert sorted(unpack(packs)) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert unpack(packs)["a.jsonl:2"][0] == before[2]["input_ids"]
    assert table.to_pylist() == before


def test_no_rows_make_no_packs():
    assert list(packed_batches(SCHEMA.empty_table(), 10)) == []


def test_padding_share_is_that_of_padded_batches():
    assert padding_share(np.array([4] * 16)) == 0
    assert padding_share(np.array([1] * 7 + [3])) == pytest.approx(1 - 10 / 24)
    assert padding_share(np.array([5] * 9)) == 0  # a last batch of one
    spread = np.random.default_rng(0).integers(20, 2001, 10_000)
    assert 0.4 < padding_share(spread) < 0.5
    assert padding_share(spread) == padding_share(spread)


def test_efficiency_is_tokens_over_room():
    assert packing_efficiency(np.array([3, 3, 4]), 2, 10) == 0.5
