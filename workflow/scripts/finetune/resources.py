"""What jobs ask Snakemake, and so SLURM, for: memory and disk in MB of 1e6 bytes, time in minutes.

From plan.json, which holds what earlier runs taught too; for evaluations, which wait for no plan,
from model.json, lint.json and the config.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from finetune.host import evaluating

if TYPE_CHECKING:
    from finetune.config import Evaluation

MARGIN = 1.1
"""Above what is predicted, in memory and on disk."""
BESIDE = 500
"""MB in a job beside its processes: Snakemake, and the shell in it."""
TIME_MARGIN, BEGINNING = 1.5, 10
"""Of what is expected, and minutes. A training that meets its limit saves, and goes on when it is
submitted again: little is lost where this is not enough."""
MERGE_MINUTES, MINUTES_PER_GB = 120, 4
"""At least, and by GB in memory: weights are read, measured on the CPU, and written."""


def mem_mb(plan: dict, stage: str, attempt: int) -> int:
    """Host memory of a node for `train` or `merge`."""
    return grown(host_bytes(plan["memory"], stage) * MARGIN / 1e6 + BESIDE, attempt)


def grown(first: float, attempt: int) -> int:
    """A job that is tried again may have been killed for its memory: half as much more a time."""
    return round(first * (1 + (attempt - 1) / 2))


def host_bytes(memory: dict, stage: str) -> int:
    """As earlier runs correct it, where there are any: they were trainings."""
    correction = memory["calibration"]["node"] if stage == "train" else None
    return correction["corrected"] if correction else memory["host"][stage]


def evaluation_mb(model: dict, lint: dict, evaluation: Evaluation, cpu: bool, attempt: int) -> int:
    """To evaluate a model, tuned or not: see `evaluating`."""
    return grown(evaluating(model, lint, evaluation, cpu) * MARGIN / 1e6 + BESIDE, attempt)


def disk_mb(plan: dict, stage: str) -> int:
    return round(plan["memory"]["disk"][stage] * MARGIN / 1e6)


def train_minutes(plan: dict) -> int | None:
    """None where no earlier run tells how fast this one will be."""
    time = plan["time"]
    return time and BEGINNING + ceil(time["seconds"] * TIME_MARGIN / 60)


def merge_minutes(plan: dict) -> int:
    loaded = plan["memory"]["host"]["merge"]
    return max(MERGE_MINUTES, ceil(loaded / 1e9 * MINUTES_PER_GB))
