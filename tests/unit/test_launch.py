"""launch.py: who is refused, what the ranks inherit, and what accelerate makes of the command."""

import errno
import inspect
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import snakemake.shell
import torch
import transformers
import yaml
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config import config_args
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

import launch
from finetune import leases
from finetune.backoff import micro_batch
from finetune.cli import UserError
from finetune.history import record
from finetune.nodes import Nodes

PLAN = {
    "global_batch": 16,
    "micro_batch": 4,
    "world_size": 2,
    "accumulation": 2,
    "gradient_checkpointing": False,
    "settings": {"nodes": 1},
}
DISK = {"train": 100, "checkpoint": 30, "trained": 10}
PLAN["memory"] = {"disk": DISK}
LAUNCHES = ["ddp", "zero1", "zero2", "zero3", "zero3-offload"]
ZERO = LAUNCHES[1:]


@pytest.mark.parametrize(
    ("granted", "devices"),
    [
        (2, 2),  # as planned
        (2, 8),  # others stay free
        (2, 0),  # CPU processes
        (1, 1),  # fewer than planned
        (4, 8),  # more
    ],
)
def test_enough_gpus_are_visible(granted, devices):
    launch.check_devices(granted, PLAN, devices)


@pytest.mark.parametrize(("granted", "devices"), [(2, 1), (4, 2), (8, 7)])
def test_more_gpus_than_are_visible_are_refused(granted, devices):
    with pytest.raises(UserError) as error:
        launch.check_devices(granted, PLAN, devices)
    assert str(error.value) == (
        f"this run wants {granted} GPUs and {devices} are visible. Run your command again "
        f"with `--resources gpu={devices}` (the batch stays 16 rows), or on the "
        "CPU with CUDA_VISIBLE_DEVICES=''."
    )


def test_as_planned_nothing_is_said(tmp_path, capsys):
    assert micro_batch(2, PLAN, tmp_path) == 4
    assert capsys.readouterr() == ("", "")


SIX = PLAN | {"global_batch": 24, "micro_batch": 6, "world_size": 4, "accumulation": 1}


@pytest.mark.parametrize(
    ("plan", "granted", "micro", "text"),
    [
        (PLAN, 1, 4, "4 x 2 x 2 = 16 rows were planned; with 1 granted it is 4 x 4 x 1"),
        (PLAN, 4, 4, "4 x 2 x 2 = 16 rows were planned; with 4 granted it is 4 x 1 x 4"),
        (PLAN, 8, 2, "4 x 2 x 2 = 16 rows were planned; with 8 granted it is 2 x 1 x 8"),
        # 6 rows do not divide a third of the batch, and 4 do
        (SIX, 3, 4, "6 x 1 x 4 = 24 rows were planned; with 3 granted it is 4 x 2 x 3"),
    ],
)
def test_another_number_of_gpus_is_said_with_the_new_split(
    plan, granted, micro, text, tmp_path, capsys
):
    assert micro_batch(granted, plan, tmp_path) == micro
    assert capsys.readouterr().err == f"micro-batch x accumulation x processes = {text}\n"


def test_what_memory_did_not_suffice_for_before_is_not_tried_again(tmp_path, capsys):
    """And the split that is said is the one that is used."""
    record(tmp_path, "out of memory", 3, next_micro_batch=2)
    assert micro_batch(1, PLAN, tmp_path) == 2
    assert "with 1 granted it is 2 x 8 x 1" in capsys.readouterr().err


def test_no_gpu_granted_is_refused(tmp_path):
    """`snakemake --cores all` without --resources grants what the rule asks for; gpu=0 caps it."""
    with pytest.raises(UserError, match=r"no GPU was granted\. Run .* `--resources gpu=1`"):
        micro_batch(0, PLAN, tmp_path)


def test_a_cap_that_does_not_divide_the_batch_is_refused_with_what_to_grant(tmp_path):
    with pytest.raises(UserError) as error:
        micro_batch(3, PLAN, tmp_path)
    assert str(error.value) == (
        "a batch of 16 rows cannot be split evenly over 3 GPUs. Run your command "
        "again with `--resources gpu=2`."
    )


@pytest.mark.parametrize(("nodes", "held"), [(1, ["0"]), (2, [])])
def test_devices_are_leased_on_one_node_and_are_slurms_on_several(
    nodes, held, tmp_path, monkeypatch
):
    monkeypatch.setattr(leases, "FOLDER", tmp_path / "leases")
    with launch.leased(1, ["0", "1"], nodes) as (ids, locks):
        assert (ids, [path.name for path in locks]) == (["0"], held)
        assert all(path.exists() for path in locks)


def snakemakes_variables():
    """What Snakemake sets to the threads of a job."""
    text = inspect.getsource(snakemake.shell)
    return set(re.findall(r"\b[A-Z]+_(?:NUM|MAXIMUM)_THREADS\b", text))


@pytest.mark.parametrize(
    ("threads", "processes", "share"), [(8, 2, "4"), (8, 3, "2"), (2, 2, "1"), (1, 4, "1")]
)
def test_each_rank_gets_its_share_of_the_threads(monkeypatch, threads, processes, share):
    names = snakemakes_variables()
    assert {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} < names
    for name in names:
        monkeypatch.setenv(name, str(threads))
    env = launch.environment(threads, processes, [])
    assert {env[name] for name in names} == {share}


def test_the_ranks_stay_off_the_net_and_keep_the_rest(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    env = launch.environment(2, 2, [])
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["TOKENIZERS_PARALLELISM"] == "false"
    assert env["PYTHONUNBUFFERED"] == "1"
    assert env["SOMETHING_ELSE"] == "kept"
    assert (env["DS_ACCELERATOR"], env["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    env = launch.environment(2, 2, ["5", "GPU-abc"])
    assert (env["DS_ACCELERATOR"], env["CUDA_VISIBLE_DEVICES"]) == ("cuda", "5,GPU-abc")


ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
GROWING = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("devices", "users", "expected"),
    [
        (["0"], {}, GROWING),
        ([], {}, {}),
        *(
            (["0"], users, users)
            for users in ({name: "backend:native"} for name in sorted(ALLOCATOR))
        ),
        (["0"], {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
    ],
)
def test_gpu_memory_is_taken_in_segments_that_grow_unless_the_user_says(
    monkeypatch, devices, users, expected
):
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    env = launch.environment(2, 1, devices)
    assert {name: env[name] for name in ALLOCATOR if name in env} == expected


def test_pytorch_reads_both_names_of_its_allocator_settings():
    header = Path(torch.__file__).parent / "include" / "c10" / "cuda" / "CUDAAllocatorConfig.h"
    read = set(re.findall(r'get_env\("(\w+)"\)', header.read_text()))
    assert read - {"PYTORCH_HIP_ALLOC_CONF"} == ALLOCATOR == set(launch.ALLOCATOR)


USERS_CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {"fsdp_version": 2},
    "mixed_precision": "fp16",
    "num_machines": 3,
    "num_processes": 7,
    "gpu_ids": "3",
    "main_process_port": 1234,
    "use_cpu": True,
    "debug": True,
}


@pytest.fixture
def users_config(tmp_path, monkeypatch):
    """~/.cache/huggingface/accelerate/default_config.yaml, which accelerate reads unasked."""
    path = tmp_path / "default_config.yaml"
    path.write_text(yaml.safe_dump(USERS_CONFIG))
    for module in (accelerate_launch, config_args):
        for name in ("default_config_file", "default_yaml_config_file", "default_json_config_file"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, str(path))


@pytest.fixture
def accelerate(monkeypatch):
    """accelerate(options): the launcher that accelerate would use, and what it would get."""
    used = []
    for name in ("deepspeed", "multi_gpu", "simple", "tpu"):
        report = lambda args, name=name: used.append((name, args))  # noqa: E731
        monkeypatch.setattr(accelerate_launch, f"{name}_launcher", report)

    def accelerate(options):
        parser = accelerate_launch.launch_command_parser()
        accelerate_launch.launch_command(parser.parse_args([*options, "train.py"]))
        return used.pop()

    return accelerate


def options(kind, processes, nodes=1):
    command = launch.accelerate_command(kind, processes)
    assert command[:2] == [sys.executable, str(launch.AGENT)]
    return command[2:] + Nodes(nodes, threads=4).meeting()


@pytest.mark.parametrize("fixtures", [[], ["users_config"]], ids=["clean", "user's config"])
@pytest.mark.parametrize("kind", LAUNCHES)
@pytest.mark.parametrize("processes", [1, 2, 8])
def test_accelerate_does_what_the_launch_kind_says(accelerate, request, fixtures, kind, processes):
    for name in fixtures:
        request.getfixturevalue(name)
    launcher, args = accelerate(options(kind, processes))
    assert launcher == ("multi_gpu" if kind == "ddp" else "deepspeed")
    assert args.num_processes == processes
    assert args.main_process_port == 0  # a free one: two jobs on a machine do not meet
    assert (args.num_machines, args.machine_rank) == (1, 0)
    assert (args.mixed_precision, args.gpu_ids) == ("no", "all")
    assert (args.use_fsdp, bool(args.use_cpu), bool(args.debug)) == (False, False, False)


def test_without_our_config_file_the_users_would_leak(accelerate, users_config):
    """That the test before this one can fail."""
    launcher, args = accelerate([])
    assert args.use_fsdp
    assert (launcher, args.num_processes, args.mixed_precision) == ("multi_gpu", 7, "fp16")


def test_ddp_starts_that_many_processes(accelerate):
    _, args = accelerate(options("ddp", 2))
    env = prepare_multi_gpu_env(args)
    assert int(args.nproc_per_node) == 2
    assert env["ACCELERATE_MIXED_PRECISION"] == "no"
    assert not any(name.startswith("ACCELERATE_DEEPSPEED") for name in env)


@pytest.mark.parametrize("kind", ZERO)
def test_zero_reads_its_deepspeed_file_from_any_folder(accelerate, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = options(kind, 2)
    file = Path(given[given.index("--deepspeed_config_file") + 1])
    assert file.is_absolute()
    assert file.name == f"{kind}.json"
    assert json.loads(file.read_text())["zero_optimization"]["stage"] == int(kind[4])
    _, env = prepare_deepspeed_cmd_env(accelerate(given)[1])
    assert env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(file)
    assert env["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == str("zero3" in kind).lower()


@pytest.mark.parametrize("fixtures", [[], ["users_config"]], ids=["clean", "user's config"])
@pytest.mark.parametrize("kind", LAUNCHES)
def test_each_of_two_nodes_starts_its_half_and_meets_the_other(accelerate, request, fixtures, kind):
    """By torchrun on each, for ZeRO too: DeepSpeed's own launcher would want ssh."""
    for name in fixtures:
        request.getfixturevalue(name)
    launcher, args = accelerate(options(kind, 4, nodes=2))
    assert launcher == ("multi_gpu" if kind == "ddp" else "deepspeed")
    args.main_process_ip = "10.0.0.1"
    prepare = prepare_multi_gpu_env if kind == "ddp" else prepare_deepspeed_cmd_env
    made = prepare(args)
    assert kind == "ddp" or made[0] is None  # no command but torchrun
    assert (args.nnodes, args.nproc_per_node) == ("2", "2")
    assert args.rdzv_endpoint == f"10.0.0.1:{args.main_process_port}"
    assert (args.rdzv_backend, args.rdzv_conf) == ("c10d", "is_host=0")


SETTINGS = {"method": "full", "launch": "zero3", "seed": 1, "attention": None}


class Attempts:
    """Those of a launch that only reports what it was given."""

    code = 0
    made: list = []  # noqa: RUF012

    def __init__(self, state, plan, facts, micro, command, env):
        self.state, self.facts, self.micro = state, facts, micro
        self.command, self.env = command, env
        self.made.append(self)

    def run(self):
        return self.code


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(exit code, gpus): what launch.main() gives to the attempts, and its exit code."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    names = ("plan", "tokens", "model", "output", "metrics", "record", "calibration", "config")
    paths = {n: tmp_path / n for n in names} | {"plan": tmp_path / "plan.json"}
    monkeypatch.setattr(launch, "Attempts", Attempts)
    monkeypatch.setattr(launch, "block_stops", lambda: None)
    monkeypatch.setattr(launch, "facts_of", lambda *given: given)

    def run(code=0, gpus=2, **settings):
        monkeypatch.setattr(Attempts, "code", code)
        monkeypatch.setattr(Attempts, "made", [])
        argv = ["launch.py", "--settings", json.dumps(SETTINGS | settings)]
        argv += ["--gpus", str(gpus), "--threads", "6"]
        argv += [p for n, path in paths.items() for p in (f"--{n}", str(path))]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            launch.main()
        assert end.value.code == code
        return Attempts.made[0]

    return run


@pytest.mark.parametrize("checkpoint", [None, Path("runs/a/checkpoints/checkpoint-8")])
def test_settings_are_frozen_and_the_script_gets_every_path(run, tmp_path, checkpoint):
    seen = run()
    assert yaml.safe_load((tmp_path / "config").read_text()) == SETTINGS
    script = launch.ROOT / "workflow" / "scripts" / "train.py"
    assert script.is_file()
    command = seen.command(4, checkpoint)
    after = command[command.index(str(script)) + 1 :]
    names = ("config", "tokens", "model", "output", "metrics", "record")
    expected = {f"--{name}": str(tmp_path / name) for name in names}
    expected |= {"--plan": str(tmp_path / "plan.json"), "--world-size": "2"}
    expected |= {"--state": str(tmp_path / "checkpoints"), "--micro-batch": "4"}
    expected |= {"--resume": str(checkpoint)} if checkpoint else {}
    assert dict(zip(after[::2], after[1::2], strict=True)) == expected
    assert seen.env["OMP_NUM_THREADS"] == "3"
    settings, _, *others = seen.facts
    assert (settings, others) == (SETTINGS, [tmp_path / "tokens", tmp_path / "model", 2])
    assert seen.micro == 4
    assert seen.state.is_dir()


@pytest.mark.parametrize("code", [0, 1, 75])
def test_the_job_ends_as_the_last_attempt(run, code, monkeypatch):
    """And later plans learn from a finished run alone."""
    kept = []
    monkeypatch.setattr(launch, "keep_for_later", lambda *given: kept.append(given))
    run(code=code)
    assert len(kept) == (code == 0)


def test_nothing_is_frozen_or_started_for_a_refused_grant(run, tmp_path):
    with pytest.raises(UserError, match="no GPU was granted"):
        run(gpus=0)
    assert not (tmp_path / "config").exists()
    assert Attempts.made == []


def test_no_gpu_is_waited_for_where_the_attention_is_not_installed(run, tmp_path, monkeypatch):
    """On the machine that trains, which need not be that of the plan."""
    monkeypatch.setattr(transformers.utils, "is_flash_attn_greater_or_equal", lambda _: False)
    monkeypatch.setattr(transformers.utils, "is_kernels_available", lambda: False)
    with pytest.raises(UserError, match=r"the package flash-attn .* which is not installed here"):
        run(attention="flash_attention_2")
    assert not (tmp_path / "config").exists()


def test_nothing_is_started_on_a_disk_too_small(run, tmp_path):
    plan = PLAN | {"memory": {"disk": DISK | {"train": 10**18}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UserError, match=r"needs 1000000000\.00 GB more \(3 checkpoints"):
        run()
    assert Attempts.made == []


def test_a_second_launch_of_a_run_is_refused(run, tmp_path):
    with launch.only_launch(tmp_path), pytest.raises(UserError) as error:
        run()
    assert "another launch of this run is alive" in str(error.value)
    run()


def test_a_line_that_cannot_be_written_fails_no_finished_run(tmp_path, capsys):
    """Snakemake deletes what a failed job has made."""
    args = SimpleNamespace(
        tokens=tmp_path, record=tmp_path / "train.json", calibration=tmp_path / "calibration.jsonl"
    )
    launch.keep_for_later(args, {})
    said = capsys.readouterr().err
    assert "no later plan learns from this run" in said
    assert "FileNotFoundError" in said
    assert not args.calibration.exists()


def test_a_file_system_without_locks_is_told_and_trained_on(run, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("finetune.leases.fcntl.flock", refuse)
    assert run().env[launch.LOCKS] == ""
    assert "has no file locks (No locks available): start this run once" in capsys.readouterr().err
