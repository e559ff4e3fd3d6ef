"""The lines of metrics.jsonl of a run that is not finished."""

from __future__ import annotations

import json
from pathlib import Path

from finetune.files import write_aside

LINES = "metrics.jsonl"
"""Its name beside the checkpoints."""


def read_lines(path: Path) -> list[dict]:
    """Whole lines: the last one may be cut short by a kill."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def cut_back(path: Path, step: int) -> None:
    """Leave what was logged up to a step: all after it is trained, and logged, again."""
    kept = [line for line in read_lines(path) if line["step"] <= step and "train_loss" not in line]
    with write_aside(path) as aside:
        aside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")


def lacks_validation(path: Path, step: int, plan: dict, every: int | None) -> bool:
    """Whether a validation was due after this step, and the run ended before it was logged."""
    due = step == plan["steps"] or step % (every or plan["steps_per_epoch"]) == 0
    logged = any(line["step"] == step and "eval_loss" in line for line in read_lines(path))
    return step > 0 and due and not logged
