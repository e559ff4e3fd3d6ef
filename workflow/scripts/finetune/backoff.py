"""The micro-batch to train with where the planned one does not do: memory ran out, or another
number of GPUs was granted."""

from __future__ import annotations

from pathlib import Path

from finetune.batch import split_batch
from finetune.cli import UserError, run_again, say
from finetune.history import backed_off, read_history

SIGNS = (
    "out of memory",  # CUDA, NCCL and MPS
    "failed to cuda calloc",  # NCCL's last error, where "out of memory" is only in its log
    "can't allocate memory",  # the CPU allocator
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",  # how cuBLAS puts it when its workspace does not fit
)


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, or of what the host grants. torch.OutOfMemoryError is a RuntimeError."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in SIGNS)


def fitting_micro(global_batch: int, world_size: int, most: int) -> int:
    """The largest micro-batch up to `most` that splits the global batch without a remainder."""
    share = global_batch // world_size
    return max(micro for micro in range(1, min(most, share) + 1) if share % micro == 0)


def smaller_micro(global_batch: int, world_size: int, micro: int) -> int | None:
    """The next smaller one, which is half where that divides; None if there is none."""
    if micro == 1:
        return None
    share = global_batch // world_size
    half = max(1, micro // 2)
    return half if share % half == 0 else fitting_micro(global_batch, world_size, micro - 1)


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
