"""Memory: the formulas give the numbers of the papers they are from."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.memory import CONTEXT, NF4_BITS, NF4_DOUBLE_BITS, ModelShapes, training_memory

GB = 1e9


def llama_7b() -> dict:
    """model.json of LLaMA 7B, as far as memory depends on it."""
    square = [(name, 4096, 4096) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    wide = [("gate_proj", 4096, 11008), ("up_proj", 4096, 11008), ("down_proj", 11008, 4096)]
    return {
        "causal": True,
        "parameters": 6_738_415_616,
        "linear_layers": [
            {"name": name, "in_features": rows, "out_features": columns, "count": 32}
            for name, rows, columns in square + wide
        ],
        "layers": 32,
        "hidden_size": 4096,
        "heads": 32,
        "vocab_size": 32_000,
        "context": 2048,
    }


LLAMA = ModelShapes.of(llama_7b(), 64, "all-linear")
ZERO_PAPER = ModelShapes(7_500_000_000, 0, 0, layers=1, hidden=1, heads=1, vocab=1)
LAUNCHES = ("ddp", "zero1", "zero2", "zero3", "zero3-offload")


def predict(shapes: ModelShapes = LLAMA, **changes: object) -> dict[str, int]:
    run = {
        "method": "qlora",
        "launch": "ddp",
        "gpus": 1,
        "double": True,
        "micro": 1,
        "length": 512,
        "checkpointing": True,
    }
    return training_memory(shapes, **run | changes)


def states(parts: dict[str, int]) -> int:
    return parts["weights"] + parts["gradients"] + parts["optimizer"]


def test_quantized_layers_are_all_but_embeddings_head_and_norms() -> None:
    assert LLAMA.linear == 6_476_005_376
    assert LLAMA.parameters - LLAMA.linear == 2 * 32_000 * 4096 + 65 * 4096


@pytest.mark.parametrize(
    ("rank", "targets", "parameters"),
    [
        (64, "all-linear", 159_907_840),  # what peft prints for QLoRA's LLaMA 7B
        (8, ["q_proj", "v_proj"], 4_194_304),  # and for Alpaca-LoRA's
        (8, [], 0),
        (0, "all-linear", 0),
    ],
)
def test_adapter_parameters(rank, targets, parameters) -> None:
    assert ModelShapes.of(llama_7b(), rank, targets).adapter == parameters


def test_bits_a_parameter_of_the_qlora_paper() -> None:
    """Section 3: constants cost 0.5 bit a parameter, and 0.127 when they are quantized too."""
    assert NF4_BITS == 4.5
    assert round(NF4_DOUBLE_BITS, 3) == 4.127
    assert round(NF4_BITS - NF4_DOUBLE_BITS, 3) == 0.373


@pytest.mark.parametrize(("double", "base"), [(True, 3_865_591_808), (False, 4_167_573_504)])
def test_quantized_weights(double, base) -> None:
    """4-bit linear layers, 16-bit embeddings, head and norms, fp32 adapters."""
    assert predict(double=double)["weights"] == base + 159_907_840 * 4


def test_quantized_base_is_near_what_the_qlora_paper_measured() -> None:
    """5,048 MB for LLaMA 7B on the GPU. Its CUDA context is in that."""
    base = predict()["weights"] - LLAMA.adapter * 4
    assert base + CONTEXT == pytest.approx(5.048 * GB, rel=0.1)


@pytest.mark.parametrize(
    ("launch", "gigabytes"), [("ddp", 120.0), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)]
)
def test_model_states_of_the_zero_paper(launch, gigabytes) -> None:
    """Figure 1: 7.5 billion parameters in mixed precision with Adam on 64 GPUs."""
    parts = predict(ZERO_PAPER, method="full", launch=launch, gpus=64)
    assert round(states(parts) / GB, 1) == gigabytes


def test_offload_keeps_no_optimizer_on_the_gpu() -> None:
    parts = predict(ZERO_PAPER, method="full", launch="zero3-offload", gpus=64)
    assert parts["optimizer"] == 0
    assert states(parts) == 7_500_000_000 * 4 / 64


@pytest.mark.parametrize(
    ("launch", "weights", "gradients", "optimizer"),
    [
        ("ddp", 13_476_831_232 + 639_631_360, 639_631_360, 1_279_262_720),
        ("zero1", 13_476_831_232 + 639_631_360, 319_815_680, 479_723_520),
        ("zero2", 13_476_831_232 + 639_631_360, 79_953_920, 479_723_520),
        ("zero3", (13_476_831_232 + 639_631_360) // 4, 79_953_920, 479_723_520),
        # two of 32 layers, and the gradients of one
        ("zero3-offload", (13_476_831_232 + 639_631_360) // 16, 319_815_680 // 32, 0),
    ],
)
def test_states_of_lora_on_four_gpus(launch, weights, gradients, optimizer) -> None:
    parts = predict(method="lora", launch=launch, gpus=4)
    assert [parts[k] for k in ("weights", "gradients", "optimizer")] == [
        weights,
        gradients,
        optimizer,
    ]


@pytest.mark.parametrize(
    ("micro", "length", "checkpointing", "expected"),
    [
        # a layer: 34 sbh + 5 as²b bytes
        (1, 2048, False, 32 * (34 * 2048 * 4096 + 5 * 32 * 2048**2)),
        (3, 100, False, 3 * 32 * (34 * 100 * 4096 + 5 * 32 * 100**2)),
        # checkpointed: 2 sbh a layer, and one whole layer at a time
        (1, 2048, True, 32 * 2 * 2048 * 4096 + 34 * 2048 * 4096 + 5 * 32 * 2048**2),
        (2, 2048, True, 2 * (32 * 2 * 2048 * 4096 + 34 * 2048 * 4096 + 5 * 32 * 2048**2)),
    ],
)
def test_activations(micro, length, checkpointing, expected) -> None:
    parts = predict(micro=micro, length=length, checkpointing=checkpointing)
    assert parts["activations"] == expected


def test_other_parts() -> None:
    parts = predict(micro=2, length=512)
    assert list(parts) == [
        "weights",
        "gradients",
        "optimizer",
        "activations",
        "logits",
        "context",
        "allowance",
    ]
    assert parts["logits"] == 2 * 512 * 32_000 * 10
    assert parts["context"] == 800_000_000
    rest = sum(parts.values()) - parts["allowance"]
    assert parts["allowance"] == pytest.approx(0.05 * rest, abs=1)
    assert all(type(value) is int for value in parts.values())


RUNS = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["lora", "full"]),
        "launch": st.sampled_from(LAUNCHES),
        "gpus": st.integers(1, 64),
        "micro": st.integers(1, 16),
        "length": st.integers(1, 8192),
        "checkpointing": st.booleans(),
    }
)


def total(**run: object) -> int:
    return sum(predict(**run).values())


@given(RUNS)
def test_what_should_save_memory_never_costs_any(run) -> None:
    slack = 8  # bytes, for rounding the parts
    assert total(**run) <= total(**run | {"micro": run["micro"] + 1}) + slack
    assert total(**run) <= total(**run | {"length": run["length"] + 1}) + slack
    assert total(**run | {"gpus": run["gpus"] + 1}) <= total(**run) + slack
    assert total(**run | {"checkpointing": True}) <= total(**run | {"checkpointing": False}) + slack
    zero = [total(**run | {"launch": launch}) for launch in LAUNCHES[1:]]
    assert all(later <= earlier + slack for earlier, later in pairwise(zero))


@given(RUNS)
def test_qlora_needs_less_than_lora_and_lora_less_than_full(run) -> None:
    run |= {"launch": "ddp"}
    sizes = [total(**run | {"method": method}) for method in ("qlora", "lora", "full")]
    assert sizes == sorted(sizes)
