"""Which class a model folder is: a causal LM, a model without a head, or a classifier.

`labels`, the names of the classes, ask for a classifier, here and in `modeling`.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from finetune.cli import UserError
from finetune.tokenizer import load_tokenizer

WRITERS = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
}
"""Classes of models that write text, by the types of config they know."""


def is_causal(config: PretrainedConfig) -> bool:
    """False for BERT and its like, which write no text."""
    return headless_class(config) is None


def headless_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that config.json names, if it cannot generate. Where it names none, as DeBERTa-v3
    does not, the plain model of a type that transformers has no causal LM for, or, as of BERT, one
    beside a masked LM."""
    if config.architectures:
        named = getattr(transformers, config.architectures[0], None)
        return None if named is None or named.can_generate() else named
    kind = type(config)
    decodes = config.is_encoder_decoder or getattr(config, "is_decoder", False)
    if writes(config) and (decodes or kind not in MODEL_FOR_MASKED_LM_MAPPING):
        return None
    plain = MODEL_MAPPING.get(kind, None)
    return plain[0] if isinstance(plain, tuple) else plain  # Funnel has a second, without decoder


def writes(config: PretrainedConfig) -> bool:
    """Whether transformers, or the code that comes with the model, has a class that generates."""
    return any(type(config) in known for known in WRITERS.values()) or own_class(config)


def own_class(config: PretrainedConfig) -> bool:
    return AutoModelForCausalLM.__name__ in getattr(config, "auto_map", {})


def outline(
    folder: Path | str, trust_remote_code: bool, labels: list[str] | None = None
) -> PreTrainedModel:
    """The model of a folder, a config.json or a hub id, on the meta device: names and shapes, no
    weight."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if labels is None and (headless := headless_class(config)) is not None:
        with torch.device("meta"):
            return headless(config)
    auto, head = head_of(folder, trust_remote_code, labels)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **head)
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def head_of(
    folder: Path | str, trust_remote_code: bool, labels: list[str] | None
) -> tuple[type, dict]:
    """The class that puts a head on a model, and what the model's config says of that head.

    Raises UserError where transformers has no such class."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if labels is None:
        return writer_of(config), {}
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not hasattr(
        config, "auto_map"
    ):
        raise UserError(
            f"transformers has no classifier for models of type {config.model_type}. Choose "
            "another model, or `task: causal-lm` with the labels as completions."
        )
    return AutoModelForSequenceClassification, {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
        "problem_type": "single_label_classification",
        # a decoder reads the class at the last token that is no padding
        "pad_token_id": load_tokenizer(folder, trust_remote_code).pad_token_id,
    }


def writer_of(config: PretrainedConfig) -> type:
    """The class that opens a model to generate text with: of some that see images too, another."""
    if own_class(config):
        return AutoModelForCausalLM
    for auto, known in WRITERS.items():
        if type(config) in known:
            return auto
    raise UserError(
        f"transformers has no causal language model of type {config.model_type}, so this model "
        "cannot be trained to write text. Choose another; of encoders (BERT and its like) "
        "`task: sequence-classification` makes classifiers."
    )
