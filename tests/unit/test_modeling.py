"""Models as a method trains them, and the bitsandbytes trap on CPUs with AVX512-BF16."""

from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import accelerate as placed
from transformers.modeling_outputs import BaseModelOutput

from finetune import modeling, varlen
from finetune.modeling import keep_gradients_on_cpu, load_for_inference, load_for_training

SETTINGS = {"attention": None, "trust_remote_code": False, "launch": "ddp"}
LORA = {"rank": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"}
QLORA = SETTINGS | {
    "method": "qlora",
    "lora": LORA,
    "quantization": {"type": "nf4", "double": True},
}
BATCH = {"input_ids": torch.arange(5, 29).view(2, 12), "labels": torch.arange(5, 29).view(2, 12)}
TARGETS = ["all-linear", ["q_proj", "v_proj"]]
LINEAR = 7
"""Linear layers of a Llama block."""


def cpu_has_avx512_bf16() -> bool:
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text()


def qlora_on(targets):
    return QLORA | {"lora": LORA | {"target_modules": targets}}


def load(folder, settings):
    torch.manual_seed(0)  # adapters start at random
    return load_for_training(folder, settings, local_rank=0)


def quantized_layers(model):
    return [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]


def gradients(model, evaluated):
    """What one step of training gives each trainable tensor, with or without a forward in eval
    mode before it, as a validation does it."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start, which would leave lora_A without a gradient
            parameter.data.normal_(std=0.05)
    if evaluated:
        with torch.no_grad():
            model.eval()(**BATCH)
    model.train()(**BATCH).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def test_qlora_has_a_4_bit_base_on_the_cpu_and_fp32_adapters(tiny_model):
    qlora = load(tiny_model, QLORA)
    layers = quantized_layers(qlora)
    assert len(layers) == 2 * LINEAR
    assert {layer.weight.quant_type for layer in layers} == {"nf4"}
    assert {layer.weight.dtype for layer in layers} == {torch.uint8}
    assert {layer.compute_dtype for layer in layers} == {torch.bfloat16}
    assert all(layer.weight.quant_state.nested for layer in layers)
    assert {p.device.type for p in qlora.parameters()} == {"cpu"}
    trained = {n: p for n, p in qlora.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * LINEAR
    assert all("lora_" in name and p.dtype is torch.float32 for name, p in trained.items())
    assert not any("lm_head" in name or "embed" in name for name in trained)
    assert qlora.config.use_cache is False


def test_gradients_are_those_of_the_dequantized_base(tiny_model):
    """The 4-bit kernels multiply by what dequantization gives, forward and backward."""
    qlora = load(tiny_model, QLORA)
    base = load_for_inference(tiny_model, False, QLORA["quantization"]).dequantize()
    reference = modeling.add_adapters(base.train(), QLORA)
    for model in (qlora, reference):
        torch.manual_seed(1)
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.data.normal_(std=0.05)
        model.train()(**BATCH).loss.backward()
    wanted = {name: p.grad for name, p in reference.named_parameters() if "lora_" in name}
    assert len(wanted) == 2 * 2 * LINEAR
    for name, parameter in qlora.named_parameters():
        if name in wanted:
            both = parameter.grad.flatten(), wanted[name].flatten().float()
            assert torch.cosine_similarity(*both, dim=0) >= 0.999, name
            torch.testing.assert_close(both[0].norm(), both[1].norm(), rtol=0.02, atol=0)


@pytest.mark.parametrize("targets", TARGETS)
def test_gradients_survive_an_evaluation(tiny_model, targets):
    before, after = (
        gradients(load(tiny_model, qlora_on(targets)), evaluated) for evaluated in (False, True)
    )
    assert len(before) == (28 if targets == "all-linear" else 8)
    for name, gradient in before.items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(after[name], gradient, msg=name)


@pytest.mark.skipif(not cpu_has_avx512_bf16(), reason="needs a CPU with AVX512-BF16")
@pytest.mark.parametrize("targets", TARGETS)
def test_without_the_cure_an_evaluation_spoils_gradients(tiny_model, monkeypatch, targets):
    """When this fails, bitsandbytes mended it, and keep_gradients_on_cpu() can go."""
    right = gradients(load(tiny_model, qlora_on(targets)), False)
    monkeypatch.setattr(modeling, "keep_gradients_on_cpu", lambda model: None)
    with pytest.warns(UserWarning, match="autograd kernel"):
        wrong = gradients(load(tiny_model, qlora_on(targets)), True)
    if targets == "all-linear":  # what passes the adapters is there, what passes 4-bit layers not
        far = [n for n, g in right.items() if (wrong[n] - g).norm() > 0.5 * g.norm()]
        assert len(far) >= 20
    else:
        assert not any(g is not None and g.any() for g in wrong.values())


def test_the_cure_reaches_every_4_bit_layer(tiny_model):
    model = load_for_inference(tiny_model, False, QLORA["quantization"])
    keep_gradients_on_cpu(model)
    flags = {layer.support_avx512bf16_for_cpu for layer in quantized_layers(model)}
    assert flags == {False}


@pytest.mark.parametrize(
    ("chosen", "quant_type", "nested"),
    [({"type": "nf4", "double": False}, "nf4", False), ({"type": "fp4", "double": True}, "fp4", 1)],
)
def test_quantization_settings_arrive(tiny_model, chosen, quant_type, nested):
    layer = quantized_layers(load_for_inference(tiny_model, False, chosen))[0]
    assert layer.weight.quant_type == quant_type
    assert layer.weight.quant_state.nested == nested


@pytest.mark.parametrize(
    ("changes", "names", "rank"),
    [
        ({}, {"q", "k", "v", "o", "gate", "up", "down"}, 4),
        ({"target_modules": ["q_proj", "v_proj"], "rank": 2}, {"q", "v"}, 2),
    ],
)
def test_lora_trains_adapters_alone(tiny_model, changes, names, rank):
    settings = SETTINGS | {"method": "lora", "lora": LORA | changes}
    model = load(tiny_model, settings)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert {n.split("_proj")[0].rsplit(".", 1)[-1] for n in trained} == names
    assert {min(p.shape) for p in trained.values()} == {rank}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    config = model.peft_config["default"]
    assert (config.lora_alpha, config.lora_dropout, config.task_type) == (8, 0.0, "CAUSAL_LM")


@pytest.mark.parametrize(
    ("launch", "dtype"),
    [("ddp", torch.float32), ("zero1", torch.bfloat16), ("zero3", torch.bfloat16)],
)
def test_full_trains_everything_in_the_launchers_precision(tiny_model, launch, dtype):
    settings = SETTINGS | {"method": "full", "launch": launch}
    model = load(tiny_model, settings)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(p.requires_grad for p in model.parameters())
    assert model.config.use_cache is False


@pytest.mark.parametrize("method", ["lora", "full"])
def test_only_a_quantized_load_has_a_device_map(method):
    assert modeling.placement({"method": method}, 1) == {}


def test_each_rank_pins_a_quantized_model_to_its_device(monkeypatch):
    """Never "auto", which spreads one model over all GPUs."""
    assert modeling.placement(QLORA, 1)["device_map"] == {"": "cpu"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert modeling.placement(QLORA, 1)["device_map"] == {"": 1}


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_fp16_only_on_gpus_without_bf16(monkeypatch, native, dtype):
    assert modeling.compute_dtype() is torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert modeling.compute_dtype() is dtype


@pytest.mark.parametrize(
    ("chosen", "longest", "expected"),
    [(None, 256, "eager"), (None, 257, "sdpa"), ("sdpa", 9, "sdpa"), ("eager", 9000, "eager")],
)
def test_attention_is_the_users_or_fit_for_device_and_length(tiny_model, chosen, longest, expected):
    settings = SETTINGS | {"method": "full", "attention": chosen}
    model = load_for_training(tiny_model, settings, 0, longest=longest)
    assert model.config._attn_implementation == expected


def test_on_a_gpu_transformers_chooses_the_attention_of_rows(tiny_model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert modeling.fitting_attention(5, False, tiny_model, False) is None


@pytest.mark.parametrize(
    ("installed", "capability", "why_not", "expected"),
    [
        (True, (8, 0), None, "flash_attention_2"),
        (True, (9, 0), None, "flash_attention_2"),
        (True, (7, 5), None, None),
        (False, (8, 0), None, None),
        (True, (8, 0), "samples see each other", None),
    ],
)
def test_packs_on_a_gpu_get_flash_attention_where_it_is_proven(
    monkeypatch, tiny_model, capsys, installed, capability, why_not, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(varlen, "is_flash_attn_2_available", lambda: installed)
    monkeypatch.setattr(varlen, "why_not_varlen", lambda config: why_not)
    assert modeling.fitting_attention(5, True, tiny_model, False) == expected
    assert ("samples see each other" in capsys.readouterr().err) == bool(why_not)


def test_inference_is_16_bit_and_ready(tiny_model):
    model = load_for_inference(tiny_model, False)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config.use_cache is True


def test_one_model_over_several_gpus(tiny_model, monkeypatch):
    """transformers' own map, for two GPUs that are not here."""
    room = {0: 10**9, 1: 10**9, "cpu": 10**9}
    monkeypatch.setattr(placed, "accelerate_max_memory", lambda _: dict(room))
    config = AutoConfig.from_pretrained(tiny_model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = placed._get_device_map(model, "balanced", None, None)
    assert set(found.values()) == {0, 1}
    assert modeling.left_out(found) == []


@pytest.mark.parametrize("rest", ["cpu", "disk"])
def test_what_gpus_have_no_room_for_is_not_left_to_the_host(rest):
    """transformers puts it there without a word, and each token then takes seconds."""
    assert modeling.left_out({"model.layers.0": 0, "model.layers.1": rest}) == ["model.layers.1"]


def test_to_return_states_changes_no_answer(tiny_model):
    batch = {"input_ids": torch.tensor([[1, 40, 41, 42]]), "logits_to_keep": torch.tensor([1, 3])}
    model = load_for_inference(tiny_model, False)
    whole = model(**batch).logits
    modeling.return_states(model)
    assert torch.equal(model(**batch).logits, whole)
    assert model.generate(batch["input_ids"], max_new_tokens=3).shape == (1, 7)


def test_states_return_to_the_device_of_the_inputs(tiny_model):
    """As if the last layers were on another one: `meta` is the only other that is always here."""
    model = load_for_inference(tiny_model, False)
    model.model.forward = lambda **_: BaseModelOutput(last_hidden_state=torch.ones(1, 4, 64))
    modeling.return_states(model)
    states = model.model(input_ids=torch.ones(1, 4, device="meta")).last_hidden_state
    assert states.device.type == "meta"
