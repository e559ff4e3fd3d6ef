"""Host memory of one node, and disk, in bytes: training, merging, evaluating.

What is loaded is read off modeling.py, merge.py and evaluate_model.py; what DeepSpeed offloads off
deepspeed/runtime/zero/stage3.py.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

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
from finetune.merge_check import tokens_compared
from finetune.shapes import Shapes, recorded

if TYPE_CHECKING:
    from finetune.config import Evaluation

RANK = 3_000_000_000
"""Resident memory of a process that uses CUDA: its libraries are mapped into it."""
STATES = 14
"""Bytes a token has of its state in a layer that is not trained: residuals, norms and their fp32
copies. Measured, 8 rows of 2048 tokens to 64 of 256."""
OTHER = 20_000_000
"""On disk, beside weights: tokenizer, random states, logs of the Trainer."""


def host_memory(shapes: Shapes, job: Job) -> dict[str, int]:
    """Bytes of each rule on one node."""
    sizes = {
        "train": training_host(shapes, job),
        "merge": PROCESS + merging(shapes, job),
    }
    return {rule: round(size) for rule, size in sizes.items()}


def evaluating(model: dict, lint: dict, evaluation: Evaluation, cpu: bool) -> int:
    """Bytes to evaluate a model, tuned or not, by its model.json and the lint.json of its rows:
    16-bit weights, on their way to a GPU, where all the rest is; or a CPU's batch beside them."""
    weights, shapes = model["parameters"] * 2, recorded(model["shapes"])
    if not cpu:
        return RANK + weights
    if shapes is None:  # of a kind that no run is planned with
        return PROCESS + weights
    return PROCESS + weights + evaluated_batch(shapes, lint, evaluation)


def evaluated_batch(shapes: Shapes, lint: dict, evaluation: Evaluation) -> int:
    """What a CPU holds of `batch_size` rows that are as long as the longest: keys and values of
    prompts and answers (16 bit, of each layer); beside them what the widest layer makes, or a piece
    of the logits (`head.pieces`)."""
    rows, longest, labels = evaluation.batch_size, lint["test"]["longest"], lint["labels"]
    answered = min(longest + evaluation.max_new_tokens, shapes.context or sys.maxsize)
    cached = 0 if labels else rows * answered
    tokens, outputs = rows * longest, len(labels) if labels else shapes.vocab
    projections = (3 if shapes.gated else 2) * max(1, shapes.experts)
    layer = tokens * (2 * shapes.intermediate * projections + STATES * shapes.hidden)
    logits = min(tokens * outputs, max(PIECE, rows * outputs)) * LOGIT
    return cached * shapes.layers * 2 * shapes.kv_heads * shapes.head_dim * 2 + max(layer, logits)


def scoring(shapes: Shapes, job: Job) -> int:
    """Logits of the rows that merged models are compared on: 16 bit, and fp32 of two models."""
    return tokens_compared(job.length) * (job.classes or shapes.vocab) * (2 + 4 + 4)


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
