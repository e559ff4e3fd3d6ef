"""FlashAttention for packs: where there is one, and whether a model's samples stay apart in it.

It has no mask. It cuts a row at the limits of samples that a batch names, else where positions
restart (transformers/modeling_flash_attention_utils.py, _flash_attention_forward). A model that
hands neither on to its attention lets samples see each other without a word. So a stand-in that
knows no more than it does, and needs no GPU, takes its place in a small model of the same
architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import flash_attention_mask
from transformers.utils import is_flash_attn_2_available

from finetune.cli import UserError, say
from finetune.collator import LIMITS, limits, restarting_positions
from finetune.isolation import PACKS, TOLERANCE, VOCABULARY, influence, run, why_not_isolated

FLASH = "flash_attention_2"
STAND_IN = "varlen"
WIDEST = 256
"""Elements of a head that its kernels take."""


def flash_attention(folder: Path, trust_remote_code: bool) -> str | None:
    """Its name where packs of the model in `folder` are to be trained with it on this device."""
    if not is_flash_attn_2_available() or torch.cuda.get_device_capability() < (8, 0):
        return None
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    reason = why_not_varlen(config)
    if reason:
        say(f"FlashAttention is not used for packs: {reason}")
    return None if reason else FLASH


def check_chosen(folder: Path, trust_remote_code: bool) -> None:
    """Raises UserError where a user asks for FlashAttention and packs, and the two do not go
    together."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if reason := why_not_varlen(config):
        raise UserError(
            f"`attention: {FLASH}` cannot be shown to keep packed samples apart in this model: "
            f"{reason}. Leave `attention` out under the model, or set `packing: false` under the "
            "dataset."
        )


def why_not_varlen(config: PreTrainedConfig) -> str | None:
    """None when packed samples get the logits they get alone, else the reason in one line."""
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is not None and not supports(kind):
        return f"{kind.__name__} has none"
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head > WIDEST:
        return f"a head has {head} elements, more than {WIDEST}"
    return why_not_isolated(config, flat_leak)


def supports(kind: type[PreTrainedModel]) -> bool:
    """Some models need a kernel of their own (attention sinks)."""
    own = getattr(kind, "_compatible_flash_implementations", None)
    return kind._supports_flash_attn and (own is None or FLASH in own)


@torch.no_grad()
def flat_leak(kind: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Compare samples laid end to end, as RowCollator does for FlashAttention, with each alone."""
    AttentionInterface.register(STAND_IN, attend)
    AttentionMaskInterface.register(STAND_IN, flash_attention_mask)
    lengths = [length for pack in PACKS for length in pack]
    model = kind._from_config(config, dtype=torch.float32, attn_implementation=STAND_IN).eval()
    ids = torch.randint(3, VOCABULARY, (1, sum(lengths)))
    positions = restarting_positions([lengths], ids.shape[1])
    packed = run(model, ids, positions, **limits(lengths))[0].split(lengths)
    alone = [run(model, sample[None])[0] for sample in ids[0].split(lengths)]
    bound = TOLERANCE * max(logits.abs().max().item() for logits in alone)
    pairs = zip(packed, alone, strict=True)
    found = max((one - other).abs().max().item() for one, other in pairs)
    if not found <= bound:
        return f"samples laid end to end change each other's logits by {found:.2g}"
    if not influence(model, ids) > 10 * bound:
        return "tokens change later logits too little to prove anything"
    return None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """(1, heads, tokens, size of a head) -> (1, tokens, heads, size), causal within samples."""
    place = torch.arange(query.shape[2])
    away = place[:, None] - place
    seen = (away >= 0) & (away < (sliding_window or len(place)))
    sample = torch.zeros_like(place)
    if all(given.get(name) is not None for name in LIMITS):
        sample = torch.bucketize(place, given[LIMITS[0]], right=True)
    elif position_ids is not None:
        sample = (position_ids[0] == 0).cumsum(0)
    seen &= sample[:, None] == sample
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None
