"""Which models keep samples apart in FlashAttention: tried with a stand-in, without a GPU."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.integrations import deepspeed
from transformers.models.llama import modeling_llama

from finetune import varlen
from finetune.cli import UserError
from finetune.collator import LIMITS
from finetune.isolation import why_not_isolated
from finetune.refusals import check_attention
from finetune.varlen import attend, why_not_varlen

HERE = {"gpu_memory_gb": None, "gpu_model": None}
ELSEWHERE = HERE | {"gpu_memory_gb": 24}
"""Where the plan is for a machine that is told of."""


def config(name, **changes):
    return CONFIG_MAPPING[name](**changes)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
def test_models_that_hand_positions_on_keep_samples_apart(name):
    assert why_not_varlen(config(name)) is None


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gpt_neox", "phi3"])
def test_every_layer_learns_where_samples_end(name, monkeypatch):
    """And asks no device for it: FlashAttention takes these before positions."""
    told = []

    def spy(*args, **given):
        told.append(all(given.get(limit) is not None for limit in LIMITS))
        return attend(*args, **given)

    monkeypatch.setattr(varlen, "attend", spy)
    assert why_not_varlen(config(name)) is None
    assert told[:2] == [True, True]  # the batch of all samples; then each alone


BY_LIMITS, BY_POSITIONS = set(LIMITS), {"position_ids"}


@pytest.mark.parametrize(
    ("withheld", "apart"),
    [(BY_LIMITS, True), (BY_POSITIONS, True), (BY_LIMITS | BY_POSITIONS, False)],
)
def test_either_of_what_says_where_samples_end_is_enough(monkeypatch, withheld, apart):
    inner = modeling_llama.LlamaAttention.forward

    def forward(self, *args, **given):
        return inner(self, *args, **{k: v for k, v in given.items() if k not in withheld})

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    reason = why_not_varlen(config("llama"))
    assert reason is None if apart else "end to end change each other's logits by" in reason


def test_flash_attention_that_was_asked_for_is_refused_where_samples_would_mix(tmp_path):
    """BART counts positions by itself, along the whole row."""
    settings = {"attention": "flash_attention_2", "trust_remote_code": False} | ELSEWHERE
    packs, rows = ({"packing": {"used": used}} for used in (True, False))
    config("bart").save_pretrained(tmp_path)
    refused = r"cannot be shown to keep packed samples apart .* set `packing: false`"
    with pytest.raises(UserError, match=refused):
        check_attention(settings, packs, tmp_path)
    check_attention(settings, rows, tmp_path)
    check_attention(settings | {"attention": "sdpa"}, packs, tmp_path)
    config("llama").save_pretrained(tmp_path)
    check_attention(settings, packs, tmp_path)


NOT_INSTALLED = "needs a GPU and the package flash-attn .* leave `attention` out under the model"


@pytest.mark.parametrize(
    ("attention", "where", "package", "kernels", "refused"),
    [
        ("flash_attention_2", HERE, False, False, True),
        ("flash_attention_2", HERE, True, False, False),
        ("flash_attention_2", HERE, False, True, False),
        ("flash_attention_2", ELSEWHERE, False, False, False),
        ("flash_attention_2", HERE | {"gpu_model": "h100"}, False, False, False),
        ("sdpa", HERE, False, False, False),
        (None, HERE, False, False, False),
    ],
)
def test_what_is_not_installed_is_said_by_the_plan_where_this_machine_trains(
    attention, where, package, kernels, refused, tmp_path, monkeypatch
):
    monkeypatch.setattr(transformers.utils, "is_flash_attn_greater_or_equal", lambda _: package)
    monkeypatch.setattr(transformers.utils, "is_kernels_available", lambda: kernels)
    settings, rows = {"attention": attention} | where, {"packing": {"used": False}}
    with pytest.raises(UserError, match=NOT_INSTALLED) if refused else nullcontext():
        check_attention(settings, rows, tmp_path)


def test_layers_with_a_state_do_not():
    assert "can't keep packed sequences apart" in why_not_varlen(config("qwen3_next"))


def test_under_zero3_the_small_model_is_an_ordinary_one(monkeypatch):
    """Training decides when DeepSpeed is configured, and transformers then builds shards."""
    monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", None)
    settings = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    chosen = deepspeed.HfDeepSpeedConfig(settings)
    assert why_not_varlen(config("llama")) is None
    assert deepspeed.deepspeed_config() is chosen.config  # the model that is trained is sharded


def test_the_trial_leaves_the_generators_of_gpus_alone(monkeypatch):
    """torch.manual_seed would have them all start at its seed."""
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert why_not_varlen(config("llama")) is None
    assert why_not_isolated(config("llama")) is None
    assert seeds == [3]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_could_not_show_a_leak_proves_nothing(monkeypatch):
    monkeypatch.setattr(varlen, "influence", lambda *_: 0.0)
    assert "too little to prove anything" in why_not_varlen(config("llama"))


def test_kernels_that_it_does_not_have_are_not_asked_for():
    wide = config("llama", head_dim=512)
    assert why_not_varlen(wide) == "a head has 512 elements, more than 256"
    assert why_not_varlen(config("gpt_oss")) == "GptOssForCausalLM has none"


@torch.no_grad()
def test_the_stand_in_computes_what_eager_attention_does():
    """In one long sample: with grouped keys and a window too."""
    small = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = torch.arange(3, 23)[None]
    for name, more in (("llama", {}), ("mistral", {"sliding_window": 4})):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config(name, **small, **heads, **more), attn_implementation="eager"
        ).eval()
        wanted = model(ids, use_cache=False).logits
        varlen.AttentionInterface.register(varlen.STAND_IN, attend)
        varlen.AttentionMaskInterface.register(varlen.STAND_IN, varlen.flash_attention_mask)
        model.set_attn_implementation(varlen.STAND_IN)
        torch.testing.assert_close(model(ids, use_cache=False).logits, wanted)
