"""Host memory of a process: freed tensors go back to the system."""

from __future__ import annotations

import ctypes
import os

M_MMAP_THRESHOLD = -3
"""Of mallopt(3): what is larger is mapped alone, and unmapped when it is freed."""
THRESHOLD = 2**20
"""Bytes. At a quarter of it a process is 5 % smaller and takes 25 % more time."""
KERNELS = "256"


def free_at_once() -> None:
    """Before the first micro-batch; what the user has set stays.

    Once tensors of up to 32 MB were freed, glibc takes such from one heap, and keeps the gaps that
    rows of ever other lengths leave there. oneDNN keeps a kernel for each of 1024 shapes. Under
    both a process of 1.1 GB grew to 1.8 within 160 micro-batches.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KERNELS)
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    glibc = ctypes.CDLL(None)
    glibc.mallopt(M_MMAP_THRESHOLD, THRESHOLD)
    glibc.malloc_trim(0)  # what is free so far
