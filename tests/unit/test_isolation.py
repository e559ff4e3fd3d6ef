"""Which architectures keep packed samples apart: tried, not listed."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from finetune import isolation
from finetune.isolation import PACKS, keep_layers, samples, smallest, why_not_isolated


def config(name, **changes):
    return CONFIG_MAPPING[name](**changes)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mistral", "gemma2", "gemma3_text"])
def test_attention_with_positions_that_restart_is_isolated(name):
    assert why_not_isolated(config(name)) is None


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "bloom"])
def test_a_state_that_runs_along_the_row_is_not(name):
    reason = why_not_isolated(config(name))
    assert reason.startswith("packed samples change each other's logits by ")
    assert "in a shrunken " in reason
    assert "\n" not in reason


class Broken(PreTrainedConfig):
    model_type = "broken"


def test_the_text_part_is_tried_where_that_is_what_is_loaded():
    assert why_not_isolated(config("qwen3_5")).endswith(
        "in a shrunken Qwen3_5ForCausalLM with eager attention"
    )


def test_what_cannot_be_tried_is_not_isolated_either():
    assert why_not_isolated(Broken()).startswith("Broken is no causal language model")
    huge = config("gpt_neox", hidden_size=2**15, num_attention_heads=64)
    assert "still has" in why_not_isolated(huge)
    odd = config("llama", num_attention_heads=4, num_key_value_heads=3)
    assert why_not_isolated(odd).startswith("could not try a small LlamaForCausalLM: ")


@pytest.mark.parametrize(
    "positions",
    [
        lambda packs, width: torch.arange(width).expand(len(packs), -1),  # one long sample
        lambda packs, width: torch.zeros(len(packs), width, dtype=torch.long),  # all alone
    ],
)
def test_other_positions_are_seen_to_fail(monkeypatch, positions):
    monkeypatch.setattr(isolation, "restarting_positions", positions)
    assert "change each other's logits" in why_not_isolated(config("llama"))


def test_a_model_that_could_not_show_a_leak_proves_nothing(monkeypatch):
    monkeypatch.setattr(isolation, "influence", lambda *_: 0.0)
    assert "too little to prove anything" in why_not_isolated(config("llama"))


def test_padding_that_makes_no_numbers_is_seen(monkeypatch):
    run = isolation.run

    def broken(model, ids, positions=None):
        logits = run(model, ids, positions)
        logits[1:, sum(PACKS[1]) :] = torch.nan
        return logits

    monkeypatch.setattr(isolation, "run", broken)
    assert "no numbers" in why_not_isolated(config("llama"))


def test_the_small_model_has_every_kind_of_layer():
    """Jamba has attention in one layer of eight, told by a period and not by a list."""
    jamba = config(
        "jamba", hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2
    )
    kind = isolation.AutoModelForCausalLM._model_mapping[type(jamba)]
    small = smallest(kind, jamba, None)
    assert len(set(small.layers_block_type)) == 2
    assert "change each other's logits" in why_not_isolated(jamba)


def test_layers_are_kept_one_of_each_kind():
    whole = config("gemma3_text", num_hidden_layers=12)
    assert len(set(whole.layer_types)) == 2
    keep_layers(whole, 2)
    assert whole.layer_types == ["sliding_attention", "full_attention"]
    assert whole.num_hidden_layers == 2


def test_neither_config_nor_random_numbers_are_touched():
    llama, state = config("llama"), torch.get_rng_state()
    before = llama.to_dict()
    why_not_isolated(llama)
    assert llama.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_samples_are_places_in_packs():
    lengths = [part.stop - part.start for _, part in samples()]
    assert lengths == [length for pack in PACKS for length in pack]
    assert min(lengths) == 1
    assert len({sum(pack) for pack in PACKS}) > 1  # one is padded


def test_a_config_of_a_saved_model_is_tried_as_it_is(tiny_model):
    assert why_not_isolated(AutoConfig.from_pretrained(tiny_model)) is None
