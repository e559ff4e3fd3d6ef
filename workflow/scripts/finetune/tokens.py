"""The token folders of tokenize_data: their columns, and how they are opened."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from finetune.files import digest_file

if TYPE_CHECKING:
    import datasets

IDS = pa.list_(pa.int32())
TOKENS = pa.schema(
    [("id", pa.string()), ("input_ids", IDS), ("labels", IDS), ("length", pa.int32())]
)
"""`labels` are ids as well, or encoding.IGNORED. `id` is the place of the row they come from."""
CLASSES = TOKENS.set(2, pa.field("labels", pa.int64()))
"""Of labelled rows: the index of the class."""
PACKS = TOKENS.append(pa.field("lengths", IDS))
"""Of packed rows: `lengths` are those of their samples, `id` the places of them all."""


def open_tokens(folder: Path) -> datasets.Dataset:
    """One split, memory-mapped. `row` is an index by which error messages find the row."""
    import datasets

    parts = [datasets.Dataset.from_file(str(path)) for path in sorted(folder.glob("*.arrow"))]
    tokens = datasets.concatenate_datasets(parts)
    return tokens.add_column("row", np.arange(len(tokens)))


def digest_tokens(folder: Path) -> str:
    """SHA-256 over the Arrow files of a split."""
    files = sorted(folder.glob("*.arrow"))
    return hashlib.sha256("".join(map(digest_file, files)).encode()).hexdigest()
