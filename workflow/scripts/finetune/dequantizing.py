"""Models that are published quantized: made 16-bit once, or refused before their weights come.

What is trained here starts from 16-bit weights, which this workflow quantizes itself (QLoRA), and
merges into. Of the formats that transformers reads, those below it can also undo, on a CPU.
"""

from __future__ import annotations

from pathlib import Path

from finetune.cli import UserError
from finetune.files import read_json

UNDONE = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Formats that are undone, as gpt-oss and DeepSeek-V3 have them, and their classes."""


def quantized_as(folder: Path) -> str | None:
    """The format that config.json names; None for a model in 16 or 32 bit."""
    config = folder / "config.json"
    section = read_json(config).get("quantization_config") if config.exists() else None
    return section and section.get("quant_method", "an unnamed format")


def refuse_quantized(folder: Path) -> None:
    """Raise UserError for a format that cannot be undone. Asks config.json alone."""
    found = quantized_as(folder)
    if found and found not in UNDONE:
        raise UserError(
            f"this model is already quantized ({found}), and training starts from 16-bit weights. "
            "Give the model that it was made from as `source`; `method: qlora` quantizes it to 4 "
            f"bit as it loads. Of quantized models, {' and '.join(UNDONE)} can be read."
        )


def dequantize(source: Path, folder: Path, trust_remote_code: bool) -> str:
    """Write the model of `source` to `folder` in bf16, without its tokenizer. Returns what was
    done. Takes 2 bytes a parameter of memory, and of disk."""
    import torch
    import transformers

    from finetune.architecture import head_of

    found = quantized_as(source)
    auto, _ = head_of(source, trust_remote_code, None)
    model = auto.from_pretrained(
        source,
        dtype=torch.bfloat16,
        trust_remote_code=trust_remote_code,
        quantization_config=getattr(transformers, UNDONE[found])(dequantize=True),
    )
    model.save_pretrained(folder)
    return f"weights {found} -> bf16"
