"""Whether the disk holds what a run will write, looked at before training starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from finetune.checkpoints import KEPT, found
from finetune.cli import UserError
from finetune.memory import ModelShapes

GB = 1e9
OTHER = 20_000_000
"""Of a checkpoint: tokenizer, random states, logs of the Trainer."""


def space_needed(settings: dict, model: dict) -> tuple[int, int]:
    """Bytes of a checkpoint, and of what training leaves at its end.

    DDP saves fp32 weights and two fp32 moments of what is trained; DeepSpeed 16-bit weights, an
    fp32 copy and the moments. Adapters are left in fp32, all weights in 16 bit.
    """
    lora = settings.get("lora", {"rank": 0, "target_modules": []})
    shapes = ModelShapes.of(model, lora["rank"], lora["target_modules"])
    full = settings["method"] == "full"
    trained = shapes.parameters if full else shapes.adapter
    checkpoint = trained * (4 + 8 if settings["launch"] == "ddp" else 2 + 4 + 8)
    return checkpoint + OTHER, trained * (2 if full else 4) + OTHER


def check_space(state: Path, settings: dict, model: dict) -> None:
    """The checkpoints that are kept, one more while it is written, and the result."""
    checkpoint, result = space_needed(settings, model)
    there = sum(p.stat().st_size for c in found(state) for p in c.rglob("*") if p.is_file())
    needed, free = (KEPT + 1) * checkpoint + result - there, shutil.disk_usage(state).free
    if needed > free:
        raise UserError(
            f"{state.parent} needs {needed / GB:.2f} GB more ({KEPT + 1} checkpoints of "
            f"{checkpoint / GB:.2f} while one is written, {result / GB:.2f} at the end), and its "
            f"disk has {free / GB:.2f} free. Free some, or run Snakemake in a folder of a larger "
            "disk."
        )
