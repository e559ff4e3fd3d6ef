"""Train, validation or test: decided by a hash, so adding rows never moves old ones."""

from __future__ import annotations

import hashlib

SPLITS = ("train", "validation", "test")


def choose_split(key: str, seed: int, validation: float, test: float) -> str:
    """The split of every row with this key (its content, or its group's name).

    Test rows lie below `test`, so that a larger validation share never turns a test row into
    another one.
    """
    # a group's name may hold anything, lone surrogates too
    digest = hashlib.sha256(f"{seed}\0{key}".encode("utf-8", "surrogatepass")).digest()
    place = position(digest)
    if place < test:
        return "test"
    return "validation" if place >= 1 - validation else "train"


def position(digest: bytes) -> float:
    """A digest read as a number in [0, 1)."""
    return int.from_bytes(digest[:6], "big") / 2**48  # exact; 8 bytes can round up to 1
