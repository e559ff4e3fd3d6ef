"""Short rows packed into long ones, so that a training step holds tokens and not padding.

Best-fit decreasing: rows by length, longest first, each into the fullest pack that still has
room for it (Johnson 1974; Ding et al. 2024, "Fewer truncations improve language modeling",
arXiv 2404.10830). No row is cut. Each pack knows the lengths of its samples: from them the
collator makes positions that restart, by which attention keeps samples apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from finetune.encoding import IGNORED

BATCH_TOKENS = 4_000_000
"""Room in one record batch of packs: what bounds the memory of packing."""
PADDED = 8
"""Rows in a batch of which padding is told."""


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The pack of each row: numbers from 0, in the order in which packs were opened.

    The fullest pack with room is found in one step, whatever the number of packs: `spaces` has
    bit s set where some pack has s tokens free.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"rows of {lengths.min()} to {lengths.max()} tokens, packs of {capacity}")
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    packs: list[int] = []
    open_packs: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = opened = 0
    for length in lengths[order].tolist():
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            pack = open_packs[space].pop()
            if not open_packs[space]:
                spaces ^= 1 << space
        else:
            space, pack, opened = capacity, opened, opened + 1
        packs.append(pack)
        if space > length:
            open_packs[space - length].append(pack)
            spaces |= 1 << (space - length)
    found = np.empty(len(lengths), dtype=np.int32)
    found[order] = packs
    return found


def packed_batches(table: pa.Table, capacity: int) -> Iterator[pa.RecordBatch]:
    """The rows of `table` (id, input_ids, labels, length) in packs of up to `capacity` tokens.

    A pack has the same columns, its ids joined, and `lengths`, those of its samples. The table
    may be larger than memory: rows are taken for one record batch at a time.
    """
    table = table.select(["id", "input_ids", "labels", "length"])
    packs = best_fit_decreasing(table["length"].to_numpy(), capacity)
    order = np.argsort(packs, kind="stable")  # within a pack, rows keep their order
    edges = np.concatenate([[0], np.cumsum(np.bincount(packs))])
    chunks = table.to_batches()
    step = max(1, BATCH_TOKENS // capacity)
    for first in range(0, len(edges) - 1, step):
        inside = edges[first : first + step + 1]
        yield join(gather(chunks, order[inside[0] : inside[-1]]), inside - inside[0])


def gather(chunks: list[pa.RecordBatch], rows: np.ndarray) -> pa.RecordBatch:
    """Rows by index, in the order asked for.

    Each chunk is read by itself and in its own order: Table.take would first join all chunks.
    """
    starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
    order = np.argsort(rows, kind="stable")
    ascending = rows[order]
    cuts = np.searchsorted(ascending, starts)
    taken = [
        chunk.take(pa.array(ascending[left:right] - start))
        for chunk, start, left, right in zip(chunks, starts, cuts, cuts[1:], strict=False)
        if right > left
    ]
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return pa.concat_batches(taken).take(pa.array(back))


def join(rows: pa.RecordBatch, edges: np.ndarray) -> pa.RecordBatch:
    """Packs from rows that follow each other; `edges` has the first row of each pack, and the
    end. No sample's last token predicts the next sample's first one: that label is IGNORED."""
    lengths = rows["length"].to_numpy()
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    labels = rows["labels"].flatten().to_numpy().copy()
    labels[starts[:-1]] = IGNORED
    rows_of, tokens_of = pa.array(edges, pa.int32()), pa.array(starts[edges], pa.int32())
    columns = {
        "id": pc.binary_join(pa.ListArray.from_arrays(rows_of, rows["id"]), ", "),
        "input_ids": pa.ListArray.from_arrays(tokens_of, rows["input_ids"].flatten()),
        "labels": pa.ListArray.from_arrays(tokens_of, pa.array(labels)),
        "length": pa.array(np.diff(starts[edges]), pa.int32()),
        "lengths": pa.ListArray.from_arrays(rows_of, pa.array(lengths, pa.int32())),
    }
    return pa.RecordBatch.from_pydict(columns)


def packing_efficiency(lengths: np.ndarray, packs: int, capacity: int) -> float:
    """Share of the packs' room that tokens fill."""
    return float(np.sum(lengths, dtype=np.int64) / (packs * capacity))


def padding_share(lengths: np.ndarray) -> float:
    """Share of padding when rows in random order are padded to the longest of PADDED. Training
    pads less: it sorts the rows of a global batch by length, and no run is known here."""
    order = np.random.default_rng(0).permutation(len(lengths))
    starts = np.arange(0, len(order), PADDED)
    longest = np.maximum.reduceat(lengths[order], starts)
    sizes = np.diff([*starts, len(order)])
    return float(1 - np.sum(lengths, dtype=np.int64) / np.dot(longest.astype(np.int64), sizes))
