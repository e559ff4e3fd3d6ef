"""How an error says that memory did not suffice."""

from __future__ import annotations

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
