"""Saved weights against the architecture: every fault is found from the headers alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from finetune.cli import UserError
from finetune.weights import differences, expected_shapes, found_shapes, saved_shapes, verify
from project import make_tiny_gemma, make_tiny_model

TRAINED = Path("results/runs/one-run/trained")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
LARGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4}


@pytest.fixture
def folder(tmp_path):
    """A tied tiny model that a test may spoil."""
    make_tiny_model(tmp_path)
    return tmp_path


@pytest.fixture
def untied(tmp_path):
    make_tiny_model(tmp_path, tied=False)
    return tmp_path


def change(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, path, {"format": "pt"})


def fault(folder):
    with pytest.raises(UserError) as error:
        verify(folder, expected_shapes(folder, False), TRAINED)
    return str(error.value)


def test_the_text_part_of_a_larger_model_is_whole_with_its_prefix_and_without(tmp_path):
    """Of Qwen 3.5, which sees images too, transformers takes the part that reads."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "head_dim": 16}
    heads |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_key_value_heads": 2}
    images = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    config = Qwen3_5Config(
        text_config=LARGE | heads | {"vocab_size": 50},
        vision_config=images | {"out_hidden_size": 32, "num_position_embeddings": 64},
    )
    base = tmp_path / "base"
    Qwen3_5ForConditionalGeneration(config).save_pretrained(base)
    expected = expected_shapes(base, False)
    found, shapes = found_shapes(base, expected), expected.shapes
    assert {name: found[name] for name in shapes} == shapes
    assert any("visual" in name for name in found.keys() - shapes.keys())
    loaded = AutoModelForCausalLM.from_pretrained(base)
    for name, model in {
        "loaded": loaded,
        "new": AutoModelForCausalLM.from_config(loaded.config),
    }.items():
        model.save_pretrained(tmp_path / name)
        assert verify(tmp_path / name, expected, TRAINED)["tensors"] == len(shapes)
    names = [saved_shapes(tmp_path / name).keys() for name in ("loaded", "new")]
    assert ["model.language_model.norm.weight" in n for n in names] == [True, False]


def test_a_model_that_sees_images_is_whole_by_the_names_of_its_time(tmp_path):
    """Gemma 3 lies on the hub with a prefix in its vision tower that transformers now drops."""
    make_tiny_gemma(tmp_path)
    expected = expected_shapes(tmp_path, False)
    whole = verify(tmp_path, expected, TRAINED)

    def edit(tensors):
        for name in [n for n in tensors if n.startswith("vision_tower.")]:
            tensors[name.replace(".", ".vision_model.", 1)] = tensors.pop(name)

    change(tmp_path, edit)
    assert "vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias" in saved_shapes(tmp_path)
    assert verify(tmp_path, expected, TRAINED) == whole
    change(tmp_path, lambda tensors: tensors.pop("vision_tower.vision_model.post_layernorm.bias"))
    assert "vision_tower.post_layernorm.bias is missing (1 faults" in fault(tmp_path)


def test_whole_weights_pass_with_their_counts(folder):
    expected = expected_shapes(folder, False)
    assert expected.tied == {HEAD: EMBEDDING, EMBEDDING: HEAD}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert verify(folder, expected, TRAINED) == {
        "tensors": len(expected.shapes) - 1,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def test_a_missing_tensor(folder):
    change(folder, lambda tensors: tensors.pop(QUERY))
    assert fault(folder) == (
        f"the model made of {TRAINED} is not whole: {QUERY} is missing (1 faults in all). "
        f"Run your command again with `--forcerun {TRAINED}` to train anew."
    )


def test_an_empty_tensor(folder):
    """What ZeRO-3 leaves of a sharded weight that was not gathered."""
    change(folder, lambda tensors: tensors.update({QUERY: torch.zeros(0)}))
    assert f"{QUERY} is empty (1 faults" in fault(folder)


def test_a_wrong_shape(folder):
    change(folder, lambda tensors: tensors.update({QUERY: tensors[QUERY][:-1]}))
    assert f"{QUERY} is (63, 64), not (64, 64) (1 faults" in fault(folder)


def test_an_extra_tensor(folder):
    change(folder, lambda tensors: tensors.update({"base_model.x": torch.ones(1)}))
    assert "base_model.x is unknown to the architecture (1 faults" in fault(folder)


def test_three_faults_are_named_and_all_are_counted(folder):
    parts = [f"model.layers.{i}.mlp.{name}_proj.weight" for i in (0, 1) for name in ("up", "down")]
    change(folder, lambda tensors: [tensors.pop(name) for name in parts])
    text = fault(folder)
    assert text.count("is missing") == 3
    assert "(4 faults in all)" in text


def test_no_weights_at_all(folder):
    (folder / "model.safetensors").unlink()
    assert f"({len(expected_shapes(folder, False).shapes)} faults in all)" in fault(folder)


@pytest.mark.parametrize("kept", [EMBEDDING, HEAD])
def test_one_of_a_tied_pair_is_enough_whichever_it_is(folder, kept):
    change(folder, lambda tensors: tensors.update({kept: tensors.pop(EMBEDDING)}))
    assert kept in saved_shapes(folder)
    assert verify(folder, expected_shapes(folder, False), TRAINED)["tensors"] == 20


def test_both_of_a_tied_pair_are_no_fault(folder):
    change(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert verify(folder, expected_shapes(folder, False), TRAINED)["tensors"] == 21


def test_none_of_a_tied_pair_is_a_fault(folder):
    change(folder, lambda tensors: tensors.pop(EMBEDDING))
    assert f"{EMBEDDING} is missing; {HEAD} is missing (2 faults" in fault(folder)


@pytest.mark.parametrize("lost", [EMBEDDING, HEAD])
def test_an_untied_model_needs_both(untied, lost):
    assert expected_shapes(untied, False).tied == {}
    assert verify(untied, expected_shapes(untied, False), TRAINED)["tensors"] == 21
    change(untied, lambda tensors: tensors.pop(lost))
    assert f"{lost} is missing (1 faults" in fault(untied)


def test_shards_are_read_together(untied):
    tensors = load_file(untied / "model.safetensors")
    (untied / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        path = untied / f"model-0000{number}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, path)
    assert verify(untied, expected_shapes(untied, False), TRAINED)["tensors"] == 21


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        lambda tied: GPT2Config(
            vocab_size=96, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=tied
        ),
        # transformers gives the head of Pythia another name in memory than in its files
        lambda tied: GPTNeoXConfig(**LARGE, vocab_size=96, tie_word_embeddings=tied),
        # and holds all experts of a layer in one tensor
        lambda tied: MixtralConfig(**LARGE, **EXPERTS, vocab_size=96, tie_word_embeddings=tied),
        lambda tied: LlamaConfig(**LARGE, vocab_size=96, tie_word_embeddings=tied),
    ],
    ids=["gpt2", "gpt-neox", "mixtral", "llama"],
)
def test_what_transformers_saves_is_what_is_expected(config, tied, tmp_path):
    model = AutoModelForCausalLM.from_config(config(tied))
    model.save_pretrained(tmp_path)
    expected = expected_shapes(tmp_path, False)
    counts = verify(tmp_path, expected, TRAINED)
    assert counts["parameters"] == sum(p.numel() for p in model.parameters())
    assert len(expected.tied) == 2 * tied
    for lost in saved_shapes(tmp_path):
        found = saved_shapes(tmp_path)
        del found[lost]
        assert f"{lost} is missing" in differences(found, expected)
