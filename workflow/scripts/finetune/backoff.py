"""The micro-batch to train with where the planned one does not do: memory ran out, or another
number of GPUs was granted."""

from __future__ import annotations

from pathlib import Path

from finetune.batch import micro_batches, split_batch
from finetune.cli import UserError, run_again, say
from finetune.history import backed_off, read_history


def fitting_micro(global_batch: int, world_size: int, most: int) -> int:
    """The largest micro-batch up to `most` that splits the global batch without a remainder."""
    return micro_batches(global_batch // world_size, most)[-1]


def smaller_micro(global_batch: int, world_size: int, micro: int) -> int | None:
    """The next smaller one, which is half where that divides; None if there is none."""
    if micro == 1:
        return None
    smaller, half = micro_batches(global_batch // world_size, micro - 1), micro // 2
    return half if half in smaller else smaller[-1]


def micro_batch(granted: int, plan: dict, state: Path) -> int:
    """The planned one, or that which memory sufficed for last; the next smaller one where so many
    processes could not share the batch by it."""
    check_grant(granted, plan)
    size, planned = plan["global_batch"], plan["micro_batch"]
    most = min(planned, backed_off(read_history(state)) or planned)
    micro = fitting_micro(size, granted, most)
    if granted != plan["world_size"]:
        before = f"{planned} x {plan['accumulation']} x {plan['world_size']}"
        say(
            f"micro-batch x accumulation x processes = {before} = {size} rows were "
            f"planned; with {granted} granted it is "
            f"{micro} x {split_batch(size, micro, granted)} x {granted}"
        )
    return micro


def check_grant(granted: int, plan: dict) -> None:
    size, nodes = plan["global_batch"], plan["settings"]["nodes"]
    if granted and size % granted:
        fewer = max(n for n in range(nodes, granted, nodes) if size % n == 0)
        raise UserError(
            f"a batch of {size} rows cannot be split evenly over {granted} GPUs. "
            f"{run_again(f'--resources gpu={fewer}')}."
        )
    split_batch(size, 1, granted)  # it refuses none at all
