"""Whether the disk holds what a run will write, looked at before training starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from finetune.checkpoints import KEPT, found
from finetune.cli import UserError
from finetune.devices import GB


def check_space(state: Path, disk: dict[str, int]) -> None:
    """`disk` of plan.json: the checkpoints that are kept, one more while it is written, and the
    result."""
    there = sum(p.stat().st_size for c in found(state) for p in c.rglob("*") if p.is_file())
    needed, free = disk["train"] - there, shutil.disk_usage(state).free
    if needed > free:
        raise UserError(
            f"{state.parent} needs {needed / GB:.2f} GB more ({KEPT + 1} checkpoints of "
            f"{disk['checkpoint'] / GB:.2f} while one is written, {disk['trained'] / GB:.2f} at "
            f"the end), and its disk has {free / GB:.2f} free. Free some, or run Snakemake in a "
            "folder of a larger disk."
        )
