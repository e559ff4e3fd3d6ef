"""Wishes and outcome of a training, in the folder of its checkpoints.

How it ended is told by the first process that knows. Later ones only echo it.
`kind` is `stopped` (resumable), `error` (its rank has said its line), `oom`, `hang`, or `died`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

STATE = "FINETUNE_STATE"
"""Environment variable: that folder, which launch.py names to its agents."""
OUTCOME = "outcome.json"
STOP = "stop"
"""A file that is there when somebody wants the run to stop."""
SECONDS_UNSEEN = 60
"""NFS asks again for the entries of a folder after so long (mount option acdirmax)."""


def claim(folder: Path, kind: str, **facts: object) -> bool:
    """Whether this process is the first of the run to tell."""
    try:
        descriptor = os.open(folder / OUTCOME, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, **facts}))
    return True


def read_outcome(folder: Path) -> dict:
    """Empty where nobody has told, or was killed while it did."""
    try:
        return json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


def last_outcome(folder: Path) -> dict:
    """When all have ended. Empty when nobody told: the agent was killed, or training is finished.

    A network file system may for a minute not show what another node made. To make the same file
    asks its server.
    """
    if claim(folder, "untold"):
        return {}
    deadline = time.monotonic() + SECONDS_UNSEEN
    while not (outcome := read_outcome(folder)) and time.monotonic() < deadline:
        time.sleep(1)
    return outcome
