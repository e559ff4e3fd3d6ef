"""A base model as later stages find it: one folder, repaired, described exactly."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import fetch_model
from classifiers import make_tiny_bert
from finetune.cli import UserError
from finetune.outlook import shapes_in
from finetune.shapes import recorded
from project import make_tiny_model, tiny_tokenizer

DOWN = "model.layers.1.mlp.down_proj.weight"
SETTINGS = {
    "revision": None,
    "trust_remote_code": False,
    "chat_template": None,
    "pad_token": None,
}


def fetch(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> dict:
    settings = SETTINGS | {"source": str(source)} | changes
    monkeypatch.setattr(
        *(sys, "argv"),
        [
            *("fetch_model.py", "--settings", json.dumps(settings)),
            *("--pretrained", str(out / "pretrained"), "--record", str(out / "model.json")),
        ],
    )
    fetch_model.main()
    return json.loads((out / "model.json").read_text())


def test_weights_are_linked_and_the_source_stays_as_it_was(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p.name: p.read_bytes() for p in tiny_model.iterdir()}
    record = fetch(tiny_model, tmp_path, monkeypatch)
    weights = tmp_path / "pretrained" / "model.safetensors"
    assert weights.is_symlink()
    assert weights.resolve() == tiny_model / "model.safetensors"
    assert {p.name: p.read_bytes() for p in tiny_model.iterdir()} == before
    assert len(record["files"]["model.safetensors"]["sha256"]) == 64
    assert record["commit"] is None


def test_counts_are_exact(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    record = fetch(tiny_model, tmp_path, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    names = {layer["name"]: layer["count"] for layer in record["shapes"]["linear"]}
    assert names == dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 2
    )
    k_proj = {"name": "k_proj", "in_features": 64, "out_features": 32, "count": 2}
    assert k_proj in record["shapes"]["linear"]


def test_the_record_holds_what_plans_are_made_from(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = fetch(tiny_model, tmp_path / "out", monkeypatch)
    assert recorded(record["shapes"]) == shapes_in(tiny_model, False)
    assert recorded(None) is None
    assert recorded({"parameters": 1}) is None  # of other code


def test_untied_weights_are_counted_twice(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untied = tmp_path / "untied"
    untied.mkdir()
    make_tiny_model(untied, tied=False)
    tied = fetch(tiny_model, tmp_path / "a", monkeypatch)
    record = fetch(untied, tmp_path / "b", monkeypatch)
    assert record["parameters"] - tied["parameters"] == record["shapes"]["vocab"] * 64


def test_gpt2_linear_layers_are_not_transposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = tiny_tokenizer()
    source = tmp_path / "gpt2"
    GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=64)
    ).save_pretrained(source)
    tokenizer.save_pretrained(source)
    layers = fetch(source, tmp_path / "out", monkeypatch)["shapes"]["linear"]
    assert {"name": "c_attn", "in_features": 32, "out_features": 96, "count": 1} in layers


def test_a_pad_token_that_is_eos_is_repaired_everywhere(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    source = tmp_path / "source"
    source.mkdir()
    make_tiny_model(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(source)
    record = fetch(source, tmp_path / "out", monkeypatch)
    folder = tmp_path / "out" / "pretrained"
    assert record["repairs"] == [
        "pad token '<|im_end|>' -> '<|endoftext|>' (EOS is '<|im_end|>')",
        "model_max_length unset -> 256",
    ]
    repaired = AutoTokenizer.from_pretrained(folder)
    assert repaired.pad_token_id == GenerationConfig.from_pretrained(folder).pad_token_id == 0


@pytest.mark.parametrize(("trust", "refused"), [(False, True), (True, False)])
def test_code_of_a_model_needs_trust(
    tiny_model: Path, tmp_path: Path, trust: bool, refused: bool
) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {"AutoConfig": "code.ForeignConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(
        "from transformers import PretrainedConfig\n"
        "class ForeignConfig(PretrainedConfig):\n    model_type = 'foreign'\n"
    )
    if refused:
        with pytest.raises(
            UserError, match=r"runs Python code of its own.*trust_remote_code: true"
        ):
            fetch_model.model_config(tmp_path, trust)
    else:
        assert fetch_model.model_config(tmp_path, trust).model_type == "foreign"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tensors: tensors.pop(DOWN), f"{DOWN} is missing"),
        (lambda tensors: tensors.update({DOWN: tensors[DOWN][:8].clone()}), f"{DOWN} is (8, 128)"),
    ],
    ids=["missing", "wrong shape"],
)
def test_a_model_that_lacks_weights_is_refused(
    change, text: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would start the missing tensor from random values, with a warning."""
    source = Path(shutil.copytree(tiny_model, tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=re.escape(f"the weights are not whole: {text}")):
        fetch(source, tmp_path / "out", monkeypatch)
    assert not (tmp_path / "out" / "pretrained").exists()


def test_sampling_settings_of_an_older_model_are_no_obstacle(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(tiny_model, tmp_path / "source"))
    (source / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    fetch(source, tmp_path / "out", monkeypatch)
    saved = json.loads((tmp_path / "out" / "pretrained" / "generation_config.json").read_text())
    assert (saved["temperature"], saved["do_sample"]) == (0.9, True)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    make_tiny_bert(tmp_path / "bert")
    return tmp_path / "bert"


def test_an_encoder_is_described_exactly(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BertModel

    record = fetch(bert, tmp_path / "out", monkeypatch)
    assert (record["architecture"], record["causal"]) == ("BertModel", False)
    assert record["parameters"] == sum(
        p.numel() for p in BertModel.from_pretrained(bert).parameters()
    )
    sizes = [tuple(layer.values()) for layer in record["shapes"]["linear"]]
    assert sizes == [
        *((name, 64, 64, 2) for name in ("query", "key", "value")),
        ("dense", 64, 64, 3),  # behind attention in each layer, and the pooler
        ("dense", 64, 128, 2),
        ("dense", 128, 64, 2),
    ]
    assert record["repairs"] == ["model_max_length unset -> 64"]
    assert not (tmp_path / "out" / "pretrained" / "generation_config.json").exists()


def test_a_causal_model_is_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fetch(tiny_model, tmp_path, monkeypatch)["causal"] is True


def test_an_encoder_that_lacks_weights_is_refused(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(bert / "model.safetensors")
    del tensors["pooler.dense.bias"]
    save_file(tensors, bert / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"not whole: pooler\.dense\.bias is missing \(1 faults"):
        fetch(bert, tmp_path / "out", monkeypatch)


def test_tensors_by_the_names_of_the_first_bert_are_known(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bert-base-uncased has them; transformers reads them."""
    tensors = load_file(bert / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        tensors = {key.replace(new, name): tensor for key, tensor in tensors.items()}
    assert "embeddings.LayerNorm.gamma" in tensors
    save_file(tensors, bert / "model.safetensors", metadata={"format": "pt"})
    assert fetch(bert, tmp_path / "out", monkeypatch)["architecture"] == "BertModel"


def unname(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))


def test_a_model_that_names_no_class_is_taken_for_a_causal_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(tiny_model, tmp_path / "source"))
    unname(source)
    record = fetch(source, tmp_path / "out", monkeypatch)
    assert (record["architecture"], record["causal"]) == ("LlamaForCausalLM", True)


@pytest.mark.parametrize("prefix", ["", "deberta."])
def test_an_encoder_that_names_no_class(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeBERTa-v3: transformers has no causal LM of its type. Its files have the prefix that the
    base model has in a model with a head."""
    from transformers import DebertaV2Config, DebertaV2Model

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    source = tmp_path / "deberta"
    DebertaV2Model(DebertaV2Config(vocab_size=400, num_hidden_layers=1, **shape)).save_pretrained(
        source
    )
    tiny_tokenizer().save_pretrained(source)
    unname(source)
    tensors = load_file(source / "model.safetensors")
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    record = fetch(source, tmp_path / "out", monkeypatch)
    assert (record["architecture"], record["causal"]) == ("DebertaV2Model", False)


def test_bert_that_names_no_class_is_no_causal_model(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers has a causal LM of its type, of which the files lack the head."""
    unname(bert)
    record = fetch(bert, tmp_path / "out", monkeypatch)
    assert (record["architecture"], record["causal"]) == ("BertModel", False)


def save_untrained(config, folder: Path) -> Path:
    """Random weights of the class that transformers picks, and a tokenizer."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_model_of_text_and_images_is_described_by_its_text_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Gemma3Config

    text = {"vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": 96}
    images = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    images |= {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=images)
    assert not hasattr(config, "vocab_size")
    record = fetch(save_untrained(config, tmp_path / "gemma"), tmp_path / "out", monkeypatch)
    assert record["architecture"] == "Gemma3ForConditionalGeneration"
    assert (record["context"], record["causal"]) == (96, True)
    assert [record["shapes"][x] for x in ("vocab", "layers", "context")] == [400, 2, 96]
    assert "model_max_length unset -> 96" in record["repairs"]


def test_a_model_without_attention_is_described_without_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import MambaConfig

    config = MambaConfig(vocab_size=400, hidden_size=64, num_hidden_layers=2)
    assert not hasattr(config, "num_attention_heads")
    record = fetch(save_untrained(config, tmp_path / "mamba"), tmp_path / "out", monkeypatch)
    assert record["architecture"] == "MambaForCausalLM"
    assert (record["context"], record["shapes"]) == (None, None)
