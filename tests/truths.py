"""Published figures of memory, and what this project predicts for the same.

`make memory` writes the table in docs/memory.md again; a test holds it to this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.memory import ALLOWANCE, Job, predicted, trained, training_memory, weight_update
from finetune.shapes import Shapes, shapes_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- table of tests/truths.py -->\n", "<!-- end -->\n"
GB, GIB = 1e9, 2**30
LLAMA = {
    # hidden, intermediate, layers, heads, heads of keys and values, vocabulary
    "LLaMA 7B": (4096, 11008, 32, 32, 32, 32_000),
    "LLaMA 13B": (5120, 13824, 40, 40, 40, 32_000),
    "LLaMA 33B": (6656, 17920, 60, 52, 52, 32_000),
    "LLaMA 65B": (8192, 22016, 80, 64, 64, 32_000),
    "Llama 2 70B": (8192, 28672, 80, 64, 8, 32_000),
    "Llama 3.1 8B": (4096, 14336, 32, 32, 8, 128_256),
}
"""Dimensions as published (arXiv 2302.13971, 2307.09288, 2407.21783)."""


@dataclass(frozen=True)
class Truth:
    """`plain` is what is predicted for this project; `alike` for what the source did, where it
    keeps something else than this project does, which `why` names."""

    source: str
    what: str
    published: float
    plain: float
    alike: float
    why: str = ""

    @property
    def error(self) -> float:
        return self.alike / self.published - 1


def llama_config(name: str) -> LlamaConfig:
    hidden, wide, layers, heads, kv_heads, vocab = LLAMA[name]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
    )


@cache
def llama(name: str) -> Shapes:
    with torch.device("meta"):
        return shapes_of(LlamaForCausalLM(llama_config(name)))


def job(method: str, launch: str = "ddp", world: int = 1, **more) -> Job:
    row = {"micro": 1, "length": 512, "supervised": 512, "checkpointing": True}
    return Job(method, launch, world, world, **row | {"attention": "sdpa"} | more)


def truths() -> list[Truth]:
    return [*qlora_paper(), *zero_paper(), *deepspeed(), *peft(), *torchtune()]


def qlora_paper() -> Iterator[Truth]:
    totals = {"LLaMA 7B": 6.9, "LLaMA 13B": 11.3, "LLaMA 33B": 24.7, "LLaMA 65B": 45.0}
    for name, published in totals.items():
        dropout = 0.1 if name in ("LLaMA 7B", "LLaMA 13B") else 0.05
        parts = training_memory(llama(name), job("qlora", rank=64, dropout=dropout))
        kept = parts["adapters"] / 2 + parts["gradients"] / 2 + parts["autocast"]
        yield Truth(
            "QLoRA paper, appendix G",
            f"{name}, QLoRA r 64, 1 x 512 tokens",
            published * GB,
            predicted(parts),
            predicted(parts) - kept * (1 + ALLOWANCE),
            "adapters and their gradients in 16 bit there; fp32 here",
        )


def zero_paper() -> Iterator[Truth]:
    shapes = replace(llama("LLaMA 7B"), parameters=7_500_000_000)
    for launch, published in (("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)):
        parts = training_memory(shapes, job("full", launch, 64, micro=64, length=4096))
        states = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
        what = f"7.5B, full, {launch}, 64 GPUs: model states"
        yield Truth("ZeRO paper, figure 1", what, published * GB, states, states)


def deepspeed() -> Iterator[Truth]:
    """Its estimators count model states at the update, on 8 GPUs."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as stage3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as stage2

    shapes = llama("Llama 3.1 8B")
    whole, largest = shapes.parameters, shapes.outside
    estimates = {
        "zero2": stage2(whole, 8, cpu_offload=False)[1],
        "zero3": stage3(whole, largest, 8, cpu_offload=False, cpu_offload_params=False)[1],
    }
    for launch, published in estimates.items():
        run = job("full", launch, 8, length=64, supervised=1)
        parts = training_memory(shapes, run)
        held = sum(parts[x] for x in ("weights", "gradients", "optimizer"))
        yield Truth(
            "DeepSpeed's estimator",
            f"Llama 3.1 8B, full, {launch}, 8 GPUs: model states",
            published,
            held + weight_update(shapes, run),
            held + whole / 8 * 4,
            "gradients in fp32 all at once" if launch == "zero3" else "",
        )


def peft() -> Iterator[Truth]:
    flash = {"attention": "flash_attention_2", "rank": 8, "dropout": 0.1}
    run = job("lora", "zero3", 8, micro=8, length=2048, supervised=2048, **flash)
    shapes = llama("Llama 2 70B")
    parts = training_memory(shapes, run)
    # 16 bit, log-softmax in fp32, and its gradient (transformers ForCausalLMLoss)
    total, whole = predicted(parts), 8 * 2048 * shapes.vocab * (2 + 4 + 4)
    yield Truth(
        "PEFT docs, DeepSpeed page",
        "Llama 2 70B, LoRA r 8, zero3, 8 GPUs, 8 x 2048 tokens",
        64 * GB,
        total,
        total + (whole - parts["logits"]) * (1 + ALLOWANCE),
        "all logits at once",
    )


def torchtune() -> Iterator[Truth]:
    run = {"micro": 2, "length": 2048, "supervised": 2048, "rank": 8, "dropout": 0.0}
    layers = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for method, published in (("lora", 16.2), ("qlora", 7.4)):
        chosen = job(method, **run, targets=layers)
        shapes = llama("Llama 3.1 8B")
        parts = training_memory(shapes, chosen)
        # bf16 adapters and moments; figures of the allocator, without CUDA's own. Its 8 chunks of
        # logits are as large as our two pieces
        differs = trained(shapes, chosen) * (2 + 2 + 4)
        differs += parts["autocast"] + parts["context"]
        kept = shapes.layers * shapes.hidden * 2 * 2 * 2048  # inputs of layers
        differs += parts["activations"] - kept
        yield Truth(
            "torchtune README",
            f"Llama 3.1 8B, {method} r 8, 2 x 2048 tokens",
            published * GIB,
            predicted(parts),
            predicted(parts) - differs * (1 + ALLOWANCE),
            "layers compiled, bf16 adapters and moments; no CUDA context",
        )


def table() -> str:
    lines = [
        "| source | what | published | predicted here | for what they did | error | differs by |",
        "|---|---|---|---|---|---|---|",
    ]
    for truth in truths():
        sizes = [f"{size / GB:.1f}" for size in (truth.published, truth.plain, truth.alike)]
        cells = [truth.source, truth.what, *sizes, f"{truth.error:+.0%}", truth.why]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table that is true now."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
