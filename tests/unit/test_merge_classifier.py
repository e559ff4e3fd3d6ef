"""Merging classifiers: the head comes along, and the folder knows its classes."""

import json

import pytest
import torch
from peft import LoraModel, PeftModel
from safetensors.torch import load_file, save_file
from test_merge import FACTS, run_merge
from transformers import AutoModelForSequenceClassification

from classifiers import LABELS, make_labelled_tokens, make_tiny_bert
from finetune.classification import LabelCollator, class_scores
from finetune.cli import UserError
from finetune.modeling import load_for_inference, load_for_training
from finetune.tokenizer import load_tokenizer
from finetune.tokens import open_tokens

TASK = {"task": "sequence-classification", "trust_remote_code": False}
LORA = TASK | {"method": "lora", "merge": {"base": "best", "tolerance": 0.1}}
FULL = TASK | {"method": "full"}
TRAINING = {"launch": "ddp", "attention": None, "trust_remote_code": False}
ADAPTER = {"rank": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
HEAD = {"bert": "classifier.weight", "llama": "score.weight"}


@pytest.fixture(scope="module", params=["bert", "llama"])
def base(request, tiny_model, tmp_path_factory):
    """A model folder, labelled tokens, and the name of its head."""
    folder = tiny_model
    if request.param == "bert":
        make_tiny_bert(folder := tmp_path_factory.mktemp("bert"))
    make_labelled_tokens(tokens := tmp_path_factory.mktemp("tokens"), load_tokenizer(folder))
    return folder, tokens, HEAD[request.param]


@pytest.fixture
def merge(base, tmp_path, monkeypatch):
    """merge(settings, trained): model/ and merge.json."""
    facts = {**FACTS, "settings": FACTS["settings"] | {"task": TASK["task"]}}
    monkeypatch.setattr("test_merge.FACTS", facts)
    folder, tokens, _ = base

    def merge(settings, trained):
        return run_merge(monkeypatch, tmp_path, settings, trained, folder, tokens)

    return merge


@pytest.fixture
def adapter(base, tmp_path):
    """trained/ of LoRA, away from zero."""
    torch.manual_seed(1)
    settings = TRAINING | {"method": "lora", "lora": ADAPTER}
    model = load_for_training(base[0], settings, 0, LABELS)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1 if "lora_" in name else 0.5)
    model.save_pretrained(tmp_path / "trained")
    return tmp_path / "trained"


def test_merged_logits_are_the_trained_ones_head_included(merge, adapter, base):
    folder, tokens, head = base
    served, record = merge(LORA, adapter)
    bare = load_for_inference(folder, False, labels=LABELS)
    model = PeftModel.from_pretrained(bare, adapter).eval()
    batch = LabelCollator(load_tokenizer(folder))(list(open_tokens(tokens / "validation")))
    with torch.inference_mode():
        before = class_scores(model, batch)[1]
        after = class_scores(AutoModelForSequenceClassification.from_pretrained(served), batch)[1]
    assert (after - before).abs().max() < 0.05 * before.abs().max()
    kept = load_file(adapter / "adapter_model.safetensors")[f"base_model.model.{head}"]
    assert kept.dtype is torch.float32
    written = load_file(served / "model.safetensors")[head]
    assert torch.equal(written, kept.to(torch.bfloat16))
    assert record["loss_merged"]["original"] == pytest.approx(record["loss_trained"], rel=0.05)
    assert 0 <= record["max_logit_difference"] < 0.05 * record["max_logit"]


def test_what_is_served_knows_its_classes(merge, adapter):
    folder, record = merge(LORA, adapter)
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "off", "1": "on", "2": "question"}
    assert config["label2id"] == {"off": 0, "on": 1, "question": 2}
    assert config["architectures"][0].endswith("ForSequenceClassification")
    names = {path.name for path in folder.iterdir()}
    assert "generation_config.json" not in names
    assert record["tensors"] == len(load_file(folder / "model.safetensors"))


def test_a_merge_that_lost_the_head_is_refused(merge, adapter, base, monkeypatch):
    """The base's own head starts at random at each load."""
    whole = LoraModel.merge_and_unload

    def lose(self, **options):
        model = whole(self, **options)
        model.get_parameter(base[2]).data.normal_(std=0.5)
        return model

    monkeypatch.setattr(LoraModel, "merge_and_unload", lose)
    with pytest.raises(UserError, match=r"held-out rows the merged model's loss|moved a logit"):
        merge(LORA, adapter)


@pytest.fixture
def trained(base, tmp_path):
    """trained/ of full fine-tuning."""
    torch.manual_seed(1)
    model = load_for_training(base[0], TRAINING | {"method": "full"}, 0, LABELS)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "trained")
    return tmp_path / "trained"


def test_full_weights_are_linked_and_verified(merge, trained):
    folder, record = merge(FULL, trained)
    file = folder / "model.safetensors"
    assert file.samefile(trained / "model.safetensors")
    assert record["tensors"] == len(load_file(file))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.id2label == dict(enumerate(LABELS))


def test_a_head_for_other_classes_is_refused(merge, trained, base):
    tensors = load_file(trained / "model.safetensors")
    tensors[base[2]] = tensors[base[2]][:2].clone()
    save_file(tensors, trained / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"\.weight is \(2, 64\), not \(3, 64\)"):
        merge(FULL, trained)
