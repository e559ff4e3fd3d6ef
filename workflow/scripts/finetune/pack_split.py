"""A token folder packed in its place, and what that gains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from finetune.files import complete_directory
from finetune.packing import packed_batches, packing_efficiency, padding_share
from finetune.tokens import PACKS, open_tokens


def pack_split(folder: Path, lengths: Sequence[int], size: int | None) -> dict[str, Any]:
    """Put packs of up to `size` tokens in the place of rows of these lengths; None leaves them.

    Returns shares of padding before and after, and under `train` what lint.json says anew.
    """
    before = padding_share(np.array(lengths)) if lengths else 0.0
    if size is None:
        return {
            "used": False,
            "padding_before": before,
            "padding_after": before,
            "efficiency": None,
        }
    packs = write_packs(folder, size)
    return {
        "used": True,
        "padding_before": before,
        "padding_after": padding_share(packs),
        "efficiency": packing_efficiency(np.array(lengths), len(packs), size),
        "train": {
            "sequences": len(packs),
            "longest": (longest := int(packs.max())),
            "most_supervised": longest,  # nearly
        },
    }


def write_packs(folder: Path, size: int) -> np.ndarray:
    """Returns the lengths of the packs, in tokens."""
    rows = open_tokens(folder).data.table
    lengths: list[int] = []
    with complete_directory(folder) as aside:
        path = str(aside / "packs.arrow")
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, PACKS) as writer:
            for batch in packed_batches(rows, size):
                writer.write_batch(batch)
                lengths += batch["length"].to_pylist()
    return np.array(lengths)
