"""The token folders of tokenize_data, opened read-only."""

from __future__ import annotations

import hashlib
from pathlib import Path

import datasets

from finetune.files import digest_file


def open_tokens(folder: Path) -> datasets.Dataset:
    """One split of tokenize_data, memory-mapped."""
    return datasets.load_from_disk(str(folder))


def digest_tokens(folder: Path) -> str:
    """SHA-256 over the Arrow files of a split."""
    files = sorted(folder.glob("*.arrow"))
    return hashlib.sha256("".join(map(digest_file, files)).encode()).hexdigest()
