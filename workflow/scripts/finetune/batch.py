"""The global batch, split over GPUs and accumulation steps without a remainder."""

from __future__ import annotations

from finetune.cli import UserError, run_again

NO_GPU = f"no GPU was granted. {run_again('--resources gpu=1')}, or more."


def split_batch(global_batch: int, micro: int, world_size: int) -> int:
    """Gradient accumulation steps with which micro x steps x world size = global batch.

    Raises UserError, naming values that would divide, when no whole number does.
    """
    if world_size < 1:
        raise UserError(NO_GPU)
    steps, remainder = divmod(global_batch, micro * world_size)
    if remainder == 0:
        return steps
    raise UserError(
        f"batch.global {global_batch} is not a multiple of "
        f"batch.micro {micro} x {world_size} GPUs = {micro * world_size}. "
        + cures(global_batch, micro, world_size)
    )


def cures(global_batch: int, micro: int, world_size: int) -> str:
    """The nearest settings that divide."""
    unit = micro * world_size
    near = sorted({max(unit, global_batch // unit * unit), (global_batch // unit + 1) * unit})
    text = f"Set batch.global to {' or '.join(map(str, near))}"
    share, remainder = divmod(global_batch, world_size)
    if remainder == 0:
        text += f", or batch.micro to one of {', '.join(map(str, micro_batches(share)))}"
    return text + "."


def micro_batches(share: int, most: int | None = None) -> list[int]:
    """Micro-batches of up to `most` rows that split the `share` of a process without a remainder,
    the smallest first."""
    limit = share if most is None else min(most, share)
    return [rows for rows in range(1, limit + 1) if share % rows == 0]
