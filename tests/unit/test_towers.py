"""Of a model that sees too, text trains the decoder and the head, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForSequenceClassification,
)

from finetune.architecture import outline
from finetune.cli import UserError
from finetune.cross_entropy import causal_loss
from finetune.guards import GradientGuard
from finetune.memory import trained
from finetune.modeling import load_for_training
from finetune.shapes import shapes_of
from finetune.towers import in_towers, text_modules, towers
from project import make_tiny_gemma, make_tiny_model
from truths import job

TEXT = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}


def make_mistral(folder: Path) -> None:
    images = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    images |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Mistral3Config(
        text_config={"model_type": "mistral"} | TEXT,
        vision_config={"model_type": "pixtral"} | images,
        image_token_index=299,
    )
    Mistral3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)


def make_qwen(folder: Path) -> None:
    images = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    images |= {"out_hidden_size": 64, "num_position_embeddings": 64}
    turns = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
    config = Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": turns},
        vision_config=images | {"deepstack_visual_indexes": [0]},
        **{f"{kind}_token_id": 290 + i for i, kind in enumerate(("image", "video"))},
    )
    Qwen3VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)


FAMILIES = {
    "gemma3": (make_tiny_gemma, ["model.vision_tower", "model.multi_modal_projector"]),
    "mistral3": (make_mistral, ["model.vision_tower", "model.multi_modal_projector"]),
    "qwen3_vl": (make_qwen, ["model.visual"]),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[Path, list[str]]:
    make, names = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    make(folder)
    return folder, names


def load(folder: Path, method: str, targets: str | list[str] | None = None):
    settings = {"method": method, "launch": "ddp", "attention": None, "trust_remote_code": False}
    settings |= {"quantization": {"type": "nf4", "double": True}}
    settings |= {"lora": LORA | {"target_modules": targets}}
    return load_for_training(folder, settings, 0).train()


def train_a_step(model) -> None:
    ids = torch.randint(3, 280, (1, 12))
    batch = {"input_ids": ids, "labels": ids, "logits_to_keep": torch.arange(11)}
    model(**batch, shift_labels=ids[:, 1:], num_items_in_batch=torch.tensor(11)).loss.backward()


def test_towers_are_all_that_the_base_has_beside_the_decoder(family) -> None:
    folder, names = family
    model = outline(folder, False)
    assert sorted(towers(model)) == sorted(names)
    beside = [n for n, _ in model.named_parameters() if n.startswith(tuple(f"{x}." for x in names))]
    assert shapes_of(model).frozen == sum(model.get_parameter(n).numel() for n in beside) > 0


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]], ids=["all", "q and v"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_are_in_the_decoder_alone_and_get_gradients(family, method, targets) -> None:
    folder, names = family
    model = load(folder, method, targets)
    adapters = [name for name, p in model.named_parameters() if p.requires_grad]
    assert not any(name in adapter for name in names for adapter in adapters)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count == shapes_of(outline(folder, False)).adapter(4, targets)
    guard = GradientGuard(model)
    guard.arm()
    train_a_step(model)
    guard.on_step_end()
    assert guard.checks == 1


def test_full_training_leaves_towers_as_they_are(family) -> None:
    folder, _ = family
    model, shapes = load(folder, "full"), shapes_of(outline(folder, False))
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count == trained(shapes, job("full", "ddp")) < shapes.parameters
    guard = GradientGuard(model)
    guard.arm()
    train_a_step(model)
    guard.on_step_end()


def test_the_loss_is_taken_by_the_count_of_tokens(family) -> None:
    """The class of Qwen 3 VL says that it takes no count: the Trainer then averages over
    micro-batches, so that a token of a short one weighs more."""
    model = load(family[0], "full")
    assert model.loss_function is causal_loss
    assert model.accepts_loss_kwargs


def test_layers_of_towers_are_no_targets(family) -> None:
    """Mistral's tower has an o_proj too, and Qwen's a qkv."""
    shapes = shapes_of(outline(family[0], False))
    seven = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {layer.name: layer.count for layer in shapes.linear} == dict.fromkeys(seven, 2)


def test_a_model_that_only_reads_has_none(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    model = outline(tmp_path, False)
    assert (towers(model), in_towers(model)) == ([], None)
    assert list(text_modules(model)) == [name for name, _ in model.named_modules()]
    assert shapes_of(model).frozen == 0


def test_an_encoder_of_text_is_no_tower() -> None:
    part = TEXT | {"layer_types": ["full_attention"] * 2}
    config = T5GemmaConfig(encoder=part, decoder=part, vocab_size=300, num_labels=2)
    with torch.device("meta"):
        assert towers(T5GemmaForSequenceClassification(config)) == []


def test_a_type_that_writes_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}'
    )
    with pytest.raises(UserError, match=r"no causal language model of type t5, so"):
        outline(tmp_path, False)


def test_a_type_without_classifiers_is_refused(tmp_path: Path) -> None:
    make_mistral(tmp_path)
    with pytest.raises(UserError, match=r"no classifier for models of type mistral3\. Choose"):
        outline(tmp_path, False, labels=["a", "b"])
