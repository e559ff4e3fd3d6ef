"""Memory one GPU needs for a training step, in bytes, from shapes alone.

Sources: QLoRA (Dettmers et al. 2023, arXiv 2305.14314, section 3) for 4-bit weights; ZeRO
(Rajbhandari et al. 2020, arXiv 1910.02054, section 5) for model states; Korthikanti et al.
2022 (arXiv 2205.05198, equations 1 and 2) for activations.
"""

from __future__ import annotations

from dataclasses import dataclass

NF4_BITS = 4 + 32 / 64
"""Payload and one fp32 constant a block of 64 weights."""
NF4_DOUBLE_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""The same with 8-bit constants and one fp32 constant for 256 of them: 4.127 bits."""
CONTEXT = 800_000_000
"""CUDA context and library workspaces of one process."""
ALLOWANCE = 0.05
"""Share of the total that the caching allocator leaves in fragments."""


@dataclass(frozen=True)
class ModelShapes:
    """What the formulas need to know of a model."""

    parameters: int
    linear: int
    """Parameters of the linear layers that are quantized."""
    adapter: int
    """Parameters of the LoRA adapters."""
    layers: int
    hidden: int
    heads: int
    vocab: int

    @classmethod
    def of(cls, model: dict, rank: int, targets: str | list[str]) -> ModelShapes:
        """From model.json and the LoRA settings."""
        layers = model["linear_layers"]
        adapted = [x for x in layers if targets == "all-linear" or x["name"] in targets]
        return cls(
            parameters=model["parameters"],
            linear=sum(x["in_features"] * x["out_features"] * x["count"] for x in layers),
            adapter=rank
            * sum((x["in_features"] + x["out_features"]) * x["count"] for x in adapted),
            layers=model["layers"],
            hidden=model["hidden_size"],
            heads=model["heads"],
            vocab=model["vocab_size"],
        )


def training_memory(
    shapes: ModelShapes,
    *,
    method: str,
    launch: str,
    gpus: int,
    double: bool,
    micro: int,
    length: int,
    checkpointing: bool,
    classes: int | None = None,
) -> dict[str, int]:
    """Bytes on one GPU, by part. `length` is the longest row in tokens. A classifier has logits
    for `classes`, once a row."""
    trainable = shapes.parameters if method == "full" else shapes.adapter
    parts = {
        "weights": weights(shapes, method, launch, gpus, double),
        "gradients": gradients(shapes, trainable, launch, gpus),
        "optimizer": optimizer(trainable, launch, gpus),
        "activations": activations(shapes, micro, length, checkpointing),
        # bf16 logits, their fp32 copy, and its gradient
        "logits": micro * (classes or length * shapes.vocab) * (2 + 4 + 4),
        "context": CONTEXT,
    }
    total = sum(parts.values())
    return {**{k: round(v) for k, v in parts.items()}, "allowance": round(ALLOWANCE * total)}


def weights(shapes: ModelShapes, method: str, launch: str, gpus: int, double: bool) -> float:
    if method == "qlora":
        bits = NF4_DOUBLE_BITS if double else NF4_BITS
        return (
            shapes.linear * bits / 8 + (shapes.parameters - shapes.linear) * 2 + shapes.adapter * 4
        )
    adapter = shapes.adapter * 4 if method == "lora" else 0
    if launch == "ddp":  # full: fp32 weights under autocast
        return shapes.parameters * (4 if method == "full" else 2) + adapter
    whole = shapes.parameters * 2 + adapter
    if launch == "zero3-offload":  # in host memory, but for one layer in use and one on its way
        return min(whole / gpus, whole * 2 / shapes.layers)
    return whole / (gpus if launch == "zero3" else 1)


def gradients(shapes: ModelShapes, trainable: int, launch: str, gpus: int) -> float:
    if launch == "ddp":
        return trainable * 4
    if launch == "zero3-offload":  # one layer's, on its way to host memory
        return trainable * 2 / max(gpus, shapes.layers)
    return trainable * 2 / (1 if launch == "zero1" else gpus)


def optimizer(trainable: int, launch: str, gpus: int) -> float:
    """AdamW: two fp32 moments; under ZeRO an fp32 master copy too."""
    if launch == "ddp":
        return trainable * 8
    return 0 if launch.endswith("offload") else trainable * 12 / gpus


def activations(shapes: ModelShapes, micro: int, length: int, checkpointing: bool) -> float:
    """16-bit activations kept for the backward pass."""
    tokens = micro * length
    layer = tokens * (34 * shapes.hidden + 5 * shapes.heads * length)
    if not checkpointing:
        return layer * shapes.layers
    return tokens * 2 * shapes.hidden * shapes.layers + layer
