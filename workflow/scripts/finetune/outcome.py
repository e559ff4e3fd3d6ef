"""How a training ended, told by the first process that knows. Later ones only echo it.

`kind` is `stopped` (resumable), `error` (its rank has said its line), `oom`, `hang`, or `died`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

OUTCOME = "outcome.json"


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
    """Empty when nobody told: the agent itself was killed, or training is finished."""
    try:
        return json.loads((folder / OUTCOME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # a process killed while it told
        return {}
