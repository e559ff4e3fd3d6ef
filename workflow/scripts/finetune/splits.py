"""Train, validation or test: decided by a hash, so adding rows never moves old ones."""

from __future__ import annotations

import hashlib

SPLITS = ("train", "validation", "test")


def choose_split(key: str, seed: int, validation: float, test: float) -> str:
    """The split of every row with this key (its text, or its group's name).

    The key's hash is read as a number in [0, 1). Test rows lie below `test`, so that a larger
    validation share never turns a test row into another one.
    """
    # a group's name may hold anything, lone surrogates too
    digest = hashlib.sha256(f"{seed}\0{key}".encode("utf-8", "surrogatepass")).digest()
    position = int.from_bytes(digest[:6], "big") / 2**48  # exact; 8 bytes can round up to 1
    if position < test:
        return "test"
    return "validation" if position >= 1 - validation else "train"
