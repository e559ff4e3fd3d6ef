"""config/accelerate and config/deepspeed: each launch kind has its files, and they agree."""

import json
from typing import get_args

import pytest
import yaml

from finetune.config import Launch
from launch import ROOT

KINDS = get_args(Launch)
ZERO = [kind for kind in KINDS if kind != "ddp"]
AUTO = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


def accelerate(kind):
    return yaml.safe_load((ROOT / "config" / "accelerate" / f"{kind}.yaml").read_text())


def deepspeed(kind):
    return json.loads((ROOT / "config" / "deepspeed" / f"{kind}.json").read_text())


def test_files_and_launch_kinds_are_the_same_set():
    assert {p.name for p in (ROOT / "config/accelerate").iterdir()} == {f"{k}.yaml" for k in KINDS}
    assert {p.name for p in (ROOT / "config/deepspeed").iterdir()} == {f"{k}.json" for k in ZERO}


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_is_told_of_one_machine_and_no_precision(kind):
    config = accelerate(kind)
    assert config["compute_environment"] == "LOCAL_MACHINE"
    # `use_cpu: true` would start one process, whatever --num_processes says
    assert config["use_cpu"] is False
    assert (config["num_machines"], config["machine_rank"]) == (1, 0)
    assert "num_processes" not in config
    assert config.get("mixed_precision", "no") == "no"


def test_ddp_is_multi_gpu():
    assert accelerate("ddp")["distributed_type"] == "MULTI_GPU"
    assert "deepspeed_config" not in accelerate("ddp")


@pytest.mark.parametrize("kind", ZERO)
def test_zero_names_its_own_file_and_nothing_that_file_says(kind):
    config = accelerate(kind)
    assert config["distributed_type"] == "DEEPSPEED"
    assert config["deepspeed_config"] == {
        "deepspeed_config_file": f"config/deepspeed/{kind}.json",
        "zero3_init_flag": kind.startswith("zero3"),
    }
    assert "mixed_precision" not in config  # accelerate refuses it beside a DeepSpeed file


@pytest.mark.parametrize("kind", ZERO)
def test_the_trainer_fills_in_what_it_knows(kind):
    config = deepspeed(kind)
    assert [config[key] for key in AUTO] == ["auto"] * 3
    # with it, zero.Init compares it with a world of one process and fails
    assert "train_batch_size" not in config
    assert config["bf16"] == config["fp16"] == {"enabled": "auto"}
    parameters = config["optimizer"]["params"]
    assert config["optimizer"]["type"] == "AdamW"
    assert {parameters[key] for key in ("lr", "betas", "eps", "weight_decay")} == {"auto"}
    assert "scheduler" not in config  # the Trainer makes it: constant, linear or cosine


@pytest.mark.parametrize("kind", ZERO)
def test_the_stage_is_the_one_of_the_name(kind):
    zero = deepspeed(kind)["zero_optimization"]
    assert zero["stage"] == int(kind.removeprefix("zero")[0])
    gathers = zero.get("stage3_gather_16bit_weights_on_model_save", False)
    assert gathers is (zero["stage"] == 3)


def test_offload_is_zero3_in_host_memory():
    plain, offloaded = (deepspeed(kind)["zero_optimization"] for kind in ("zero3", "zero3-offload"))
    moved = {"offload_optimizer", "offload_param"}
    assert moved == set(offloaded) - set(plain)
    assert all(offloaded[key]["device"] == "cpu" for key in moved)
    assert {key: offloaded[key] for key in plain} == plain


@pytest.mark.parametrize("kind", ZERO)
def test_the_optimizer_is_not_compiled_and_needs_no_memory_aside(kind):
    """DeepSpeed's own is compiled at the first run. Torch's takes one or two tensors of the size of
    a rank's share of the weights aside, unless it is fused."""
    parameters = deepspeed(kind)["optimizer"]["params"]
    assert parameters["torch_adam"] is parameters["fused"] is True
