"""GPUs by name: the memory of one, in GiB, as PyTorch reports it (total_memory).

It is less than the box says: the driver and error correction take theirs.
A V100 needs another build of PyTorch than the pinned one, which begins at Turing.
"""

from __future__ import annotations

GPU_MODELS = {
    "t4": 14.56,
    "v100-16": 15.77,
    "v100-32": 31.73,
    "rtx3090": 23.68,
    "rtx4090": 23.64,
    "rtx5090": 31.36,
    "a10g": 21.98,
    "l4": 21.96,
    "l40s": 44.39,
    "a6000": 47.53,
    "a100-40": 39.38,
    "a100-80": 79.15,
    "h100": 79.1,
    "h200": 139.8,
    "b200": 178.3,
}
