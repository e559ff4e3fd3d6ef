"""What the backward pass needs of the forward pass, in bytes.

The terms follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4), as transformers' modules
run today: grouped queries, gated MLPs, norms in fp32, attention that never writes its scores. A
test holds them against what autograd really keeps of such layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.memory import Job
    from finetune.shapes import Shapes

LOGIT = 2 + 2
"""Bytes of a logit: 16 bit, and its gradient (`cross_entropy`), or where nothing is trained a copy
of those that count (scores.row_scores)."""
PIECE = 2**25
"""Logits that `head` makes at once: 134 MB with their gradient."""
CHUNK, CHUNK_ON_CPU = 2**24, 2**17
"""Of them, those that `cross_entropy` has in fp32 at once, and as log-softmax: a row for each
processor of a large GPU, or what fits a core's cache."""


def logits(shapes: Shapes, job: Job) -> int:
    """Only at positions at which some row of the micro-batch is supervised, and never more than
    two pieces at once: the first, and one that is computed again (`head`). A classifier has one
    row of them for each text."""
    if job.classes:
        return job.micro * job.classes * (2 + 4 + 4)
    positions = min(job.length, job.micro * job.supervised)
    most = min(job.micro * positions * shapes.vocab, 2 * max(PIECE, job.micro * shapes.vocab))
    chunk = min(most, max(CHUNK_ON_CPU if job.cpu else CHUNK, shapes.vocab))
    return most * LOGIT + chunk * (4 + 4)


def activations(shapes: Shapes, job: Job) -> int:
    """All layers' inputs and the insides of one layer, or of all of them."""
    inside, entry = kept_of_a_layer(shapes, job), shapes.hidden * (4 if fp32(job) else 2)
    layers = entry * shapes.layers + inside if job.checkpointing else inside * shapes.layers
    masks = 0 if "flash" in job.attention else 3 * job.length  # bool, and 16-bit to be added
    tokens = job.micro * job.length
    return tokens * (layers + working(shapes, job) + masks + 2 * entry)


def fp32(job: Job) -> bool:
    """Residuals are as wide as the weights."""
    return job.method == "full" and not job.zero


def kept_of_a_layer(shapes: Shapes, job: Job) -> int:
    """Bytes a token leaves in one layer."""
    return (
        norms(shapes, job)
        + attention(shapes, job)
        + feed_forward(shapes, job)
        + (inputs(shapes) if job.method == "full" else adapter_inputs(shapes, job))
        + (2 * (2 if job.cpu else 1) * shapes.hidden if shapes.dropout else 0)
    )


def norms(shapes: Shapes, job: Job) -> int:
    """An RMSNorm is computed on an fp32 copy, and keeps its product where its weight is trained;
    a LayerNorm keeps its input, which autocast makes fp32."""
    if not shapes.rms:
        return shapes.normed * (4 if fp32(job) or not (job.zero or job.cpu) else 2)
    product = (4 if fp32(job) else 2) if job.method == "full" else 0
    return shapes.normed * (4 + product)


def attention(shapes: Shapes, job: Job) -> int:
    """Queries, keys, values and what comes out; eager attention also its scores, in fp32 and 16
    bit, for each pair of tokens. Only FlashAttention leaves grouped keys and values unrepeated."""
    query = shapes.heads * shapes.head_dim
    flash = "flash" in job.attention
    key = shapes.kv_heads * shapes.head_dim if flash else query
    # what comes out may be the input of a trained layer, and is counted there
    out = 0 if job.method == "full" or has_lean_adapters(job) else 2 * query
    kept = 2 * (query + 2 * key) + out
    # on a CPU, attention with dropout is computed step by step in any case
    if job.attention == "eager" or (job.cpu and shapes.dropout):
        return kept + score(shapes, job) * shapes.heads * job.length
    return kept + 4 * shapes.heads


def score(shapes: Shapes, job: Job) -> int:
    """Bytes of one attention weight: softmax, and its copy in 16 bit. Models with dropout of their
    own also keep its mask, and take the softmax in fp32 only where autocast or the mask does."""
    if not shapes.dropout:
        return 4 + 2
    softmax = 4 if fp32(job) or not (job.zero or job.cpu) else 2
    return softmax + (softmax if job.cpu else 1) + 2


def feed_forward(shapes: Shapes, job: Job) -> int:
    """Gate, activated gate and the other projection; or what the activation function keeps."""
    width = shapes.intermediate
    kept = 2 * width * (3 if shapes.gated else shapes.gelu)
    if not shapes.experts:
        return kept
    # each expert has a copy of its tokens, and weighs what it puts out
    return shapes.experts * (kept + 2 * 2 * shapes.hidden)


def inputs(shapes: Shapes) -> int:
    """Of the linear layers that are trained: of projections that share one, once."""
    query, width = shapes.heads * shapes.head_dim, shapes.intermediate * max(1, shapes.experts)
    return 2 * (2 * shapes.hidden + query + width)


def adapter_inputs(shapes: Shapes, job: Job) -> int:
    """What adapters keep besides their rank-r product. Those of `adapter` keep their input, which
    is shared as that of trained layers is, and no mask. Of what autocast makes fp32 each keeps a
    16-bit copy of its own."""
    layers = shapes.adapted(job.targets)
    wide = sum(x.in_features * x.count for x in layers) // shapes.layers
    narrow = sum(x.count for x in layers) * job.rank * 2 // shapes.layers
    if has_lean_adapters(job):
        shared = shapes.rms or job.zero or job.cpu
        return narrow + (min(inputs(shapes), 2 * wide) if shared else 2 * wide)
    return narrow + wide * (2 + dropout_mask(job))


def has_lean_adapters(job: Job) -> bool:
    """Whether `adapter` takes the place of peft's forward pass (modeling.add_adapters)."""
    return job.method != "full" and not job.sharded


def dropout_mask(job: Job) -> int:
    """Bytes an element in each of peft's adapters, beside a dropped copy of its input. Without
    CUDA the mask is as wide as what is dropped: fp32, like the adapter, but under ZeRO."""
    if not job.dropout:
        return 0
    return (2 if job.zero else 4) if job.cpu else 1


def working(shapes: Shapes, job: Job) -> int:
    """Gradients of the layer that the backward pass is in, where they are widest: of a gated MLP,
    or one before and after `adapter` drops some of it, and the mask."""
    masked = job.dropout and has_lean_adapters(job)
    tall = 2 * shapes.intermediate * (3 if shapes.gated or masked else 1) * max(1, shapes.experts)
    scores = (4 + 4) * shapes.heads * job.length if job.attention == "eager" else 0
    return max(tall, scores) + 4 * shapes.hidden
