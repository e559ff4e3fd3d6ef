"""Memory of one training process, in bytes and by part, from shapes alone.

Weights: QLoRA (Dettmers et al. 2023, arXiv 2305.14314, section 3). Model states: ZeRO
(Rajbhandari et al. 2020, arXiv 1910.02054, section 5). Buffers: deepspeed/runtime/zero/. What is
kept for the backward pass: `activations`. docs/memory.md compares all this with published figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from finetune.activations import activations, logits
from finetune.shapes import Shapes

CONFIGS = Path(__file__).resolve().parents[3] / "config" / "deepspeed"
NF4_BITS = 4 + 32 / 64
"""Payload and one fp32 constant a block of 64 weights."""
NF4_DOUBLE_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""The same with 8-bit constants and one fp32 constant for 256 of them: 4.127 bits."""
MOMENTS = {"adamw": 4 + 4, "adamw_8bit": 2 * (1 + 4 / 256)}
"""Bytes a trained parameter has in the optimizer: in 8 bit, with an fp32 constant for each 256
(bitsandbytes/optim/optimizer.py). Masters in fp32, under ZeRO, come on top."""
CUDA = 800_000_000
"""CUDA context, cuBLAS workspaces and NCCL buffers of one process."""
PROCESS = 700_000_000
"""Resident memory of a process without CUDA that trains next to nothing: 670 to 700 MB measured,
under DDP and ZeRO-3."""
ALLOWANCE = 0.05
"""Share of the total that the caching allocator leaves in fragments."""
BUCKET = 500_000_000
"""Elements, where deepspeed/*.json does not say (reduce_bucket_size in zero/config.py)."""
LIVE = 1_000_000_000
"""Parameters that ZeRO-3 keeps gathered at most (stage3_max_live_parameters)."""


@dataclass(frozen=True)
class Job:
    """One way of training a model: all that its memory depends on besides the model."""

    method: str
    launch: str
    world: int
    """Processes, over all nodes."""
    per_node: int
    micro: int
    length: int
    """Tokens of the longest row."""
    supervised: int
    """Of one row at most. Logits are computed nowhere else (collator.RowCollator)."""
    checkpointing: bool
    attention: str
    cpu: bool = False
    rank: int = 16
    targets: str | tuple[str, ...] = "all-linear"
    dropout: float = 0.05
    double: bool = True
    classes: int | None = None
    optimizer: str = "adamw"
    """Under DDP. ZeRO has AdamW alone."""

    @property
    def zero(self) -> bool:
        return self.launch != "ddp"

    @property
    def sharded(self) -> bool:
        return self.launch.startswith("zero3")

    @property
    def offload(self) -> bool:
        """CPU processes have nowhere to put it: it stays in the memory that they share."""
        return self.launch.endswith("offload") and not self.cpu


def training_memory(shapes: Shapes, job: Job) -> dict[str, int]:
    """Bytes of one process by part, in the phase that needs the most: the backward pass, or the
    update of the weights. The caching allocator gives nothing back between them."""
    held = {
        "weights": weights(shapes, job),
        "adapters": adapters(shapes, job),
        "gradients": gradients(shapes, job),
        "optimizer": optimizer(shapes, job),
        "buffers": buffers(shapes, job),
        # on a CPU the pages of the file that weights were loaded from count as resident
        "context": PROCESS + shapes.parameters * 2 if job.cpu else CUDA,
    }
    backward = {
        "autocast": autocast(shapes, job),
        "gathered": gathered(shapes, job),
        "activations": activations(shapes, job),
        "logits": logits(shapes, job),
        "temporary": temporary(shapes, job),
    }
    update = {"update": weight_update(shapes, job)}
    most = max(backward, update, key=lambda phase: sum(phase.values()))
    parts = {name: round(size) for name, size in (held | most).items()}
    return parts | {"allowance": round(ALLOWANCE * sum(parts.values()))}


def predicted(parts: Mapping[str, int]) -> int:
    """What a process is expected to take. All that asks whether something fits asks this."""
    return sum(parts.values())


def trained(shapes: Shapes, job: Job) -> int:
    """Parameters that get a gradient."""
    if job.method == "full":
        return shapes.parameters - shapes.frozen
    return shapes.adapter(job.rank, job.targets) + (shapes.head if job.classes else 0)


def weights(shapes: Shapes, job: Job) -> float:
    """modeling.weight_dtype: fp32 for full fine-tuning under DDP, else 16 bit; 4 bit in the layers
    that bitsandbytes replaces. Embeddings, norms, head and fused experts are not among them."""
    if job.method == "qlora":
        bits = NF4_DOUBLE_BITS if job.double else NF4_BITS
        return shapes.quantized * bits / 8 + (shapes.parameters - shapes.quantized) * 2
    if job.launch == "ddp":
        return shapes.parameters * (4 if job.method == "full" else 2)
    if job.offload:
        return 0
    return shapes.parameters * 2 / (job.world if job.sharded else 1)


def adapters(shapes: Shapes, job: Job) -> float:
    """fp32 (peft, autocast_adapter_dtype). DeepSpeed casts them with the module to 16 bit
    (runtime/engine.py, _configure_distributed_model)."""
    if job.method == "full" or job.offload:
        return 0
    size = trained(shapes, job) * (2 if job.zero else 4)
    return size / (job.world if job.sharded else 1)


def gradients(shapes: Shapes, job: Job) -> float:
    """In the dtype of the weights that are trained; ZeRO-2 and 3 keep a share of them."""
    if job.offload:
        return 0
    size = trained(shapes, job) * (2 if job.zero else 4)
    return size / (1 if job.launch in ("ddp", "zero1") else job.world)


def optimizer(shapes: Shapes, job: Job) -> float:
    """Moments, and under ZeRO the fp32 masters, shared out: K = 12 of the ZeRO paper."""
    if not job.zero:
        return trained(shapes, job) * MOMENTS[job.optimizer] + looked_up(shapes, job)
    size = trained(shapes, job) * MOMENTS["adamw"]
    return 0 if job.offload else (size + trained(shapes, job) * 4) / job.world


def looked_up(shapes: Shapes, job: Job) -> float:
    """What 8 bit does not save: the Trainer leaves the moments of embeddings in fp32."""
    if job.method != "full":
        return 0
    return shapes.vocab * shapes.hidden * (MOMENTS["adamw"] - MOMENTS[job.optimizer])


def buffers(shapes: Shapes, job: Job) -> float:
    """DDP's buckets are a second copy of the gradients (gradient_as_bucket_view is off in
    accelerate). DeepSpeed reduces in buckets of fixed size, two of them where it overlaps
    (stage_1_and_2.py, setup_buckets; stage3.py has one)."""
    if not job.zero:
        return trained(shapes, job) * 4 if job.world > 1 else 0
    section = zero_section(job.launch)
    size = section.get("reduce_bucket_size", BUCKET)
    # "auto" is filled in by transformers (integrations/deepspeed.py, trainer_config_finalize)
    elements = shapes.hidden**2 if size == "auto" else size
    return elements * 2 * (2 if section.get("overlap_comm") and not job.sharded else 1)


@cache
def zero_section(launch: str) -> dict:
    return json.loads((CONFIGS / f"{launch}.json").read_text())["zero_optimization"]


def autocast(shapes: Shapes, job: Job) -> float:
    """16-bit copies of fp32 weights that the graph holds until the backward pass. An embedding is
    looked up as it is, unless it is the head too."""
    if job.zero:
        return 0
    if job.method == "full":
        lookup = shapes.vocab * shapes.hidden if shapes.head else 0
        return (trained(shapes, job) - lookup) * 2
    return trained(shapes, job) * 2


def gathered(shapes: Shapes, job: Job) -> float:
    """16-bit weights that ZeRO-3 has whole at once: those in use, those that are used again soon,
    the prefetched and the persistent (zero/partitioned_param_coordinator.py)."""
    if not job.sharded:
        return 0
    live = min(shapes.parameters, LIVE)
    return 2 * max(live, shapes.block + shapes.persistent, shapes.outside)


def temporary(shapes: Shapes, job: Job) -> float:
    """The largest weight, dequantized for its backward pass (bitsandbytes MatMul4Bit), or its
    gradient on the way to the others."""
    if job.method != "full":
        whole = shapes.largest_quantized if job.method == "qlora" else 0
        return 2 * (whole + merged_experts(shapes, job))
    return max(shapes.outside, shapes.largest_quantized) * (2 if job.zero else 6)


def merged_experts(shapes: Shapes, job: Job) -> float:
    """peft adds adapters of experts to their weights before they are used (lora/layer.py,
    ParamWrapper): a second copy, of all layers unless they are recomputed."""
    if job.targets != "all-linear":
        return 0
    return shapes.expert_weights / (shapes.layers if job.checkpointing else 1)


def weight_update(shapes: Shapes, job: Job) -> float:
    """DeepSpeed turns its share of gradients to fp32; ZeRO-3 does so in groups, which it joins
    first (stage3.py, _prepare_fp32_grad_for_sub_group) and which the weight that fills one may
    exceed. The fused AdamW takes nothing; an offloaded one takes host memory."""
    if not job.zero or job.offload:
        return 0
    share = trained(shapes, job) / job.world
    if not job.sharded:
        return share * 4
    largest = max(shapes.outside, shapes.largest_quantized) / job.world
    return min(share, zero_section(job.launch)["sub_group_size"] + largest) * (2 + 4)
