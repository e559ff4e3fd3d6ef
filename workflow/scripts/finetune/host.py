"""Host memory of one node, and disk, in bytes: training, merging, evaluating.

What is loaded is read off modeling.py, merge.py and evaluate_model.py; what DeepSpeed offloads off
deepspeed/runtime/zero/stage3.py.
"""

from __future__ import annotations

from finetune.activations import LOGIT, PIECE
from finetune.checkpoints import KEPT
from finetune.memory import (
    PROCESS,
    Job,
    adapters,
    predicted,
    trained,
    training_memory,
    weights,
)
from finetune.shapes import Shapes

RANK = 3_000_000_000
"""Resident memory of a process that uses CUDA: its libraries are mapped into it."""
OTHER = 20_000_000
"""On disk, beside weights: tokenizer, random states, logs of the Trainer."""
SCORED_ROWS, SCORED_TOKENS = 16, 8_192
"""Held-out rows that merged models are compared on. Evaluation takes as many rows at a time
(`evaluation.batch_size`, if it is not set)."""


def host_memory(shapes: Shapes, job: Job) -> dict[str, int]:
    """Bytes of each rule on one node."""
    sizes = {
        "train": training_host(shapes, job),
        "merge": PROCESS + merging(shapes, job),
        "evaluate": evaluating_cpu(shapes, job) if job.cpu else evaluating(shapes.parameters),
    }
    return {rule: round(size) for rule, size in sizes.items()}


def evaluating(parameters: int) -> int:
    """16-bit weights on their way to a GPU, where all the rest is."""
    return RANK + parameters * 2


def evaluating_cpu(shapes: Shapes, job: Job) -> int:
    """The same weights, the keys and values of a batch (16 bit, of each layer), and a piece of its
    logits (`head.pieces`)."""
    tokens, outputs = SCORED_ROWS * job.length, job.classes or shapes.vocab
    cache = 0 if job.classes else tokens * shapes.layers * 2 * shapes.kv_heads * shapes.head_dim * 2
    logits = min(tokens * outputs, max(PIECE, SCORED_ROWS * outputs))
    return PROCESS + shapes.parameters * 2 + cache + logits * LOGIT


def scoring(shapes: Shapes, job: Job) -> int:
    """Logits of the rows that merged models are compared on: 16 bit, and fp32 of two models."""
    tokens = min(SCORED_ROWS * job.length, SCORED_TOKENS)
    return tokens * (job.classes or shapes.vocab) * (2 + 4 + 4)


def training_host(shapes: Shapes, job: Job) -> float:
    """Processes, and what they load through host memory or keep there."""
    if job.cpu:
        most = predicted(training_memory(shapes, job)) * job.per_node
        return max(most, loading(shapes, job)) + saving(shapes, job)
    held = max(loading(shapes, job), offloaded(shapes, job) + saving(shapes, job))
    return RANK * job.per_node + held


def loading(shapes: Shapes, job: Job) -> float:
    """Without a device map weights are built in host memory, in every rank. 4-bit weights go to
    the GPU one by one; under ZeRO-3 rank 0 alone reads the files (transformers modeling_utils)."""
    if job.method == "qlora":
        return shapes.outside * 2 * job.per_node
    if job.sharded:
        return shapes.parameters * 2 + offloaded(shapes, job)
    return (weights(shapes, job) + adapters(shapes, job)) * job.per_node


def offloaded(shapes: Shapes, job: Job) -> float:
    """Pinned: 16-bit weights; for what is trained fp32 masters, moments and gradients, and 16-bit
    gradients. DeepSpeed's own estimate is 18 bytes and half as much again for buffers."""
    if not job.offload:
        return 0
    size = shapes.parameters * 2 + trained(shapes, job) * (4 + 8 + 4 + 2)
    return size * job.per_node / job.world


def saving(shapes: Shapes, job: Job) -> float:
    """Rank 0 collects the weights that it writes."""
    return trained_files(shapes, job) if job.zero else 0


def merging(shapes: Shapes, job: Job) -> float:
    """The merged model, for QLoRA the best so far beside the next one that is tried; and what they
    are compared by. Full weights are linked and never loaded."""
    if job.method == "full":
        return 0
    return shapes.parameters * 2 * (2 if job.method == "qlora" else 1) + scoring(shapes, job)


def disk_space(shapes: Shapes, job: Job) -> dict[str, int]:
    """Bytes that rules write: the checkpoints that are kept and one more while it is written, and
    trained/; model/, which a file system without hard links copies."""
    checkpoint, result = checkpoint_size(shapes, job), trained_files(shapes, job) + OTHER
    return {
        "checkpoint": checkpoint,
        "trained": result,
        "train": (KEPT + 1) * checkpoint + result,
        "merge": shapes.parameters * 2 + OTHER,
    }


def checkpoint_size(shapes: Shapes, job: Job) -> int:
    """DDP saves fp32 weights and moments of what is trained; DeepSpeed 16-bit weights, an fp32
    copy and the moments."""
    return trained(shapes, job) * (2 + 4 + 8 if job.zero else 4 + 8) + OTHER


def trained_files(shapes: Shapes, job: Job) -> int:
    """Adapters in fp32 (in 16 bit under ZeRO, counted the same); all weights in 16 bit."""
    return trained(shapes, job) * (2 if job.method == "full" else 4)
