"""What sees or hears in a model that also reads: kept as it is, since rows are text.

Gemma 3 from 4B on, Qwen 3 VL and Mistral 3 hold, beside the decoder, a tower that sees and a
projector. Text never reaches these, so they get no gradient. Their weights stay in memory, and go
into what is merged.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from transformers import PreTrainedModel


def towers(model: PreTrainedModel) -> list[str]:
    """Names of the modules and weights that the base of a model has beside the decoder."""
    config, base, decoder = model.config, model.base_model, model.get_decoder()
    if config.get_text_config() is config or config.is_encoder_decoder or decoder is base:
        return []
    path = f"{model.base_model_prefix}." if base is not model else ""
    text = decoder, model.get_output_embeddings()
    others = [n for n, m in base.named_children() if not any(part in m.modules() for part in text)]
    return [path + name for name in [*others, *dict(base.named_parameters(recurse=False))]]


def in_towers(model: PreTrainedModel) -> str | None:
    """A pattern that the names of all modules and weights of `towers` match, and no others."""
    names = "|".join(map(re.escape, towers(model)))
    return rf"({names})(\..+)?" if names else None


def tower_weights(model: PreTrainedModel) -> list[Parameter]:
    pattern = in_towers(model)
    named = model.named_parameters() if pattern else ()
    return [weight for name, weight in named if re.fullmatch(pattern, name)]


def text_modules(model: PreTrainedModel) -> dict[str, Module]:
    """All other modules, by name."""
    pattern, named = in_towers(model), dict(model.named_modules())
    return {n: m for n, m in named.items() if pattern is None or not re.fullmatch(pattern, n)}
