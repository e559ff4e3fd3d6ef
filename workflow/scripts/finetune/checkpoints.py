"""Checkpoints that prove complete: `checkpoint.json` is written last, and names every file.

transformers takes the checkpoint with the highest number, whatever is in it: one that a kill or
a full disk cut short would be resumed from.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from finetune.cli import UserError
from finetune.devices import GB
from finetune.files import read_json, write_json

MANIFEST = "checkpoint.json"
KEPT = 2
"""The second is for when the first turns out to be broken."""


def seal(folder: Path, facts: dict) -> None:
    """Declare a checkpoint complete. All is on the disk before its manifest is."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    for path in files:
        flush(path)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    write_json(folder / MANIFEST, {"step": step_of(folder), "facts": facts, "files": sizes})
    flush(folder / MANIFEST)
    flush(folder)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def found(folder: Path) -> list[Path]:
    """All checkpoints of a run, whole or not, newest first."""
    there = [p for p in folder.glob("checkpoint-*") if p.name.rpartition("-")[2].isdigit()]
    return sorted(there, key=step_of, reverse=True)


def fault(folder: Path) -> str | None:
    """What a checkpoint lacks; None if it is complete."""
    try:
        files = read_json(folder / MANIFEST)["files"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}: saving did not end"
    except (ValueError, KeyError, TypeError):
        return f"its {MANIFEST} is broken"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, and why each newer one was passed over."""
    skipped = []
    for checkpoint in found(folder):
        if (reason := fault(checkpoint)) is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint.name} is not used: {reason}")
    return None, skipped


def rotate(folder: Path) -> None:
    """Remove all but the newest complete checkpoints, and what is left of incomplete ones."""
    complete = [checkpoint for checkpoint in found(folder) if fault(checkpoint) is None]
    for checkpoint in found(folder):
        if checkpoint not in complete[:KEPT]:
            remove(checkpoint)


def remove(checkpoint: Path) -> None:
    """The manifest goes first: half a checkpoint must not look whole."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def check_space(state: Path, disk: dict[str, int]) -> None:
    """Raises UserError where the disk does not hold what a run will write: by `disk` of plan.json
    the checkpoints that are kept, one more while it is written, and the result."""
    there = sum(p.stat().st_size for c in found(state) for p in c.rglob("*") if p.is_file())
    needed, free = disk["train"] - there, shutil.disk_usage(state).free
    if needed > free:
        raise UserError(
            f"{state.parent} needs {needed / GB:.2f} GB more ({KEPT + 1} checkpoints of "
            f"{disk['checkpoint'] / GB:.2f} while one is written, {disk['trained'] / GB:.2f} at "
            f"the end), and its disk has {free / GB:.2f} free. Free some, or run Snakemake in a "
            "folder of a larger disk."
        )
