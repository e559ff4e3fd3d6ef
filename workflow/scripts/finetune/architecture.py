"""Which class a model folder is: a causal LM, a model without a head, or a classifier.

`labels`, the names of the classes, ask for a classifier, here and in `modeling`.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from finetune.tokenizer import load_tokenizer


def is_causal(config: PretrainedConfig) -> bool:
    """False for BERT and its like: config.json names a class that cannot generate."""
    return headless_class(config) is None


def headless_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    name = next(iter(config.architectures or []), "")
    named = getattr(transformers, name, None)
    return None if named is None or named.can_generate() else named


def outline(
    folder: Path | str, trust_remote_code: bool, labels: list[str] | None = None
) -> PreTrainedModel:
    """The model of a folder, a config.json or a hub id, on the meta device: names and shapes, no
    weight."""
    auto, head = head_of(folder, trust_remote_code, labels)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **head)
    with torch.device("meta"):
        if labels is None and (headless := headless_class(config)) is not None:
            return headless(config)
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def head_of(folder: Path, trust_remote_code: bool, labels: list[str] | None) -> tuple[type, dict]:
    """The class that puts a head on a model, and what the model's config says of that head."""
    if labels is None:
        return AutoModelForCausalLM, {}
    return AutoModelForSequenceClassification, {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
        "problem_type": "single_label_classification",
        # a decoder reads the class at the last token that is no padding
        "pad_token_id": load_tokenizer(folder, trust_remote_code).pad_token_id,
    }
