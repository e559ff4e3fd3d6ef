"""Out of memory: how it is known, and the smaller micro-batch to go on with."""

from __future__ import annotations

SIGNS = (
    "out of memory",  # CUDA, NCCL and MPS
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
