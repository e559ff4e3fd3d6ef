"""Guards: each stops the run it is for, and lets a sound one pass."""

import math
import socket
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes as bnb
import pytest
import torch

from finetune import modeling, training
from finetune.cli import UserError
from finetune.guards import (
    GradientGuard,
    PlacementGuard,
    check_cuda,
    check_finite,
    check_world_size,
    placement_record,
    refuse_data_parallel,
)

CPU = torch.device("cpu")
QLORA = {
    "attention": None,
    "trust_remote_code": False,
    "launch": "ddp",
    "method": "qlora",
    "lora": {"rank": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"},
    "quantization": {"type": "nf4", "double": True},
}
BATCH = {"input_ids": torch.arange(5, 29).view(2, 12), "labels": torch.arange(5, 29).view(2, 12)}


@pytest.mark.parametrize(("gpus", "launched"), [(0, False), (1, False), (2, True), (8, True)])
def test_one_gpu_or_a_launcher_is_no_data_parallel(monkeypatch, gpus, launched):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if launched:
        monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_data_parallel()


def test_several_gpus_without_a_launcher_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError) as error:
        refuse_data_parallel()
    assert str(error.value) == (
        "2 GPUs are visible and no launcher started this process. Run `snakemake`, or "
        "workflow/scripts/launch.py, or `accelerate launch`."
    )


@pytest.mark.parametrize(("accelerator", "starts"), [("cuda", True), ("cpu", False), (None, False)])
def test_gpus_that_start_or_none_at_all(monkeypatch, accelerator, starts):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: starts)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    if accelerator:
        monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    check_cuda()


def test_cuda_that_does_not_start_is_no_cpu_training(monkeypatch):
    """launch.py counted the GPUs without starting CUDA. It is asked before all else."""
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def init():
        raise RuntimeError(old)

    old = "The NVIDIA driver on your system is too old (found version 12040)."
    here = socket.gethostname()
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UserError) as error:
        training.train(None, None, None)
    assert str(error.value) == (
        f"this run was given GPU 3 of {here}, and CUDA does not start there: {old} Compare the "
        "driver that `nvidia-smi` names with the one that the README asks for."
    )


def test_the_world_size_that_was_asked_for():
    check_world_size(2, 2)
    with pytest.raises(UserError, match="1 processes train together, but 2 were asked for"):
        check_world_size(1, 2)
    with pytest.raises(UserError, match="4 processes train together, but 2 were asked for"):
        check_world_size(4, 2)


def cpu_has_avx512_bf16() -> bool:
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text()


def layers():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False))
    model[0].weight.requires_grad_(False)
    return model


def test_placement_is_recorded():
    assert placement_record(layers(), CPU) == {
        "devices": ["cpu"],
        "sharded": False,
        "trainable_parameters": 4 + 8,
        "trainable_tensors": 2,
    }


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1", "cuda"])
def test_a_parameter_on_another_device_is_refused(device):
    with pytest.raises(UserError, match=f"are on cpu, but this rank is {device}. Was the model"):
        placement_record(layers(), torch.device(device))


def test_a_model_over_two_devices_is_refused():
    """What device_map="auto" makes of one model; "meta" stands for the second GPU."""
    model = layers()
    model[1].to("meta")
    with pytest.raises(UserError, match="parameters are on cpu, meta, but this rank is cpu"):
        placement_record(model, CPU)


def test_zero3_shards_are_counted_whole_and_may_be_elsewhere():
    model = layers()
    for parameter in model.parameters():
        parameter.ds_numel = 100
    record = placement_record(model, torch.device("cuda:0"))
    assert record["sharded"] is True
    assert record["trainable_parameters"] == 200


def test_the_placement_guard_records_when_training_begins():
    guard = PlacementGuard()
    guard.on_train_begin(SimpleNamespace(device=CPU), None, None, model=layers())
    assert guard.record["trainable_tensors"] == 2


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1, bias=False)
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        self.detach = False

    def forward(self, x):
        extra = self.unused(x)
        return self.used(self.frozen(x)) + (extra.detach() if self.detach else extra)


def step(guard, model, detach=False):
    model.detach = detach
    for _ in range(2):  # gradient accumulation
        model(torch.ones(3, 2)).sum().backward()
    guard.on_step_end()


def test_a_detached_tensor_is_found_in_the_first_step():
    model = Branches()
    guard = GradientGuard(model)
    guard.on_train_begin()
    with pytest.raises(
        UserError, match=r"1 trainable tensors got no gradient \(first: unused.weigh"
    ):
        step(guard, model, detach=True)


def test_it_is_found_in_the_first_step_after_an_evaluation():
    model = Branches()
    guard = GradientGuard(model)
    guard.on_train_begin()
    step(guard, model)
    guard.on_evaluate()
    with pytest.raises(UserError, match="first: unused"):
        step(guard, model, detach=True)


def test_a_sound_model_passes_two_checks_and_then_costs_nothing():
    model = Branches()
    guard = GradientGuard(model)
    guard.on_train_begin()
    for _ in range(3):
        step(guard, model)
        step(guard, model)
        guard.on_evaluate()
    assert guard.checks == 2
    assert guard.hooks == []
    assert all(not p._backward_hooks for p in model.parameters())


def test_a_gradient_of_zero_is_a_gradient():
    """LoRA's first matrix has one until the second has moved from zero."""
    model = Branches()
    guard = GradientGuard(model)
    guard.on_train_begin()
    (model(torch.ones(1, 2)) * 0).sum().backward()
    guard.on_step_end()
    assert guard.checks == 1


def qlora_step(model, moved):
    """Training begins, one validation, one step, under the guard."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if moved and "lora_B" in name:
            parameter.data.normal_(std=0.05)
    guard = GradientGuard(model)
    guard.on_train_begin()
    with torch.no_grad():
        model.eval()(**BATCH)
    model.train()(**BATCH).loss.backward()
    guard.on_step_end()
    return guard


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("moved", [False, True])
def test_sound_qlora_passes(tiny_model, moved, checkpointing):
    model = modeling.load_for_training(tiny_model, QLORA, 0)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    guard = qlora_step(model, moved)
    assert guard.checks == 1
    assert all(not m._backward_hooks for m in model.modules())


@pytest.fixture(params=["all-linear", ["q_proj", "v_proj"]], ids=["all", "q and v"])
def targets(request):
    return QLORA | {"lora": QLORA["lora"] | {"target_modules": request.param}}


@pytest.mark.parametrize("moved", [False, True])
def test_4_bit_layers_that_pass_no_gradient_back_are_found(tiny_model, monkeypatch, targets, moved):
    """Every adapter still gets a gradient: through the other adapters, or of zeros."""
    model = modeling.load_for_training(tiny_model, targets, 0)
    whole = bnb.nn.Linear4bit.forward
    monkeypatch.setattr(
        bnb.nn.Linear4bit, "forward", lambda self, x: whole(self, x.detach()) + 0 * x.sum()
    )
    with pytest.raises(UserError) as error:
        qlora_step(model, moved)
    # through adapters that moved, a gradient reaches all layers but the first block's q, k and v,
    # whose input needs none; else only those that write to the residual stream
    all_linear = targets["lora"]["target_modules"] == "all-linear"
    reached, inner = 11 if moved and all_linear else 4, ".base_layer" * all_linear
    assert str(error.value) == (
        f"{reached} 4-bit layers pass no gradient back (first: base_model.model.model.layers.0.mlp."
        f"down_proj{inner}), so what is before them would learn wrong things. Was their kernel "
        "repacked by an evaluation? Update bitsandbytes, or use `method: lora`."
    )


def test_a_detached_block_of_qlora_is_found_by_its_tensors(tiny_model):
    model = modeling.load_for_training(tiny_model, QLORA, 0)
    block = model.get_base_model().model.layers[0].mlp
    block.register_forward_hook(lambda module, inputs, output: output.detach())
    text = r"6 trainable tensors got no gradient \(first: base_model.*layers.0.mlp"
    with pytest.raises(UserError, match=text):
        qlora_step(model, moved=False)


@pytest.mark.skipif(not cpu_has_avx512_bf16(), reason="needs a CPU with AVX512-BF16")
@pytest.mark.filterwarnings("ignore:bitsandbytes")
@pytest.mark.parametrize("moved", [False, True])
def test_the_repacked_kernel_of_bitsandbytes_is_found(tiny_model, monkeypatch, targets, moved):
    monkeypatch.setattr(modeling, "keep_gradients_on_cpu", lambda model: None)
    model = modeling.load_for_training(tiny_model, targets, 0)
    with pytest.raises(UserError, match="4-bit layers pass no gradient back"):
        qlora_step(model, moved)


def test_finite_numbers_pass():
    check_finite(1.5, "the loss", 3, lambda: pytest.fail("rows were looked up"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_names_the_rows_and_the_cure(value):
    with pytest.raises(UserError) as error:
        check_finite(value, "the loss", 3, lambda: ["a.jsonl:1", "a.jsonl:7"])
    assert str(error.value) == (
        f"the loss is {value} at step 3, rows a.jsonl:1, a.jsonl:7. Look at these rows, lower "
        "optimizer.learning_rate, or raise schedule.warmup."
    )
