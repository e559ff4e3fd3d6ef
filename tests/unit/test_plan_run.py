"""Rule plan_run: steps, learning rate, memory against the GPU, and what it refuses."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import psutil
import pytest
from pydantic import ValidationError
from test_shapes import CONFIGS
from transformers import BertConfig, LlamaConfig, MambaConfig, T5Config

import plan_run
from finetune import architecture
from finetune.advice import Request, allowed, others
from finetune.cli import UserError
from finetune.config import Dataset, Launch, Method, Model, Run, complete_run, merge
from finetune.devices import Device, cgroup_limit, find_device, machine_memory
from finetune.fitting import micro_batches
from finetune.gpu_models import GPU_MODELS
from finetune.neighbours import neighbours, table
from finetune.outlook import job_of, shapes_in
from finetune.refusals import check_context, check_evaluation, check_rows, check_task
from finetune.shapes import shapes_of
from finetune.stages import plan_settings
from lint_record import WHOLE
from truths import job, llama, llama_config

NAMES = {"model": "m", "dataset": "d"}
CLASSIFIER = {"task": "sequence-classification"}


def settings_of(**run: object) -> dict:
    """As the rule passes them: through the config and JSON."""
    chosen = Run.model_validate(complete_run({}, NAMES | run))
    settings = plan_settings(chosen, Dataset(source="rows.jsonl"), Model(source="m"))
    return json.loads(json.dumps(settings))


def lint(longest: int = 512, labels: list[str] | None = None, sequences: int = 100) -> dict:
    """lint.json, as far as it is read: of labelled rows if there are labels."""
    task = "causal-lm" if labels is None else "sequence-classification"
    train = {"rows": 10 * sequences, "sequences": sequences, "longest": longest}
    train["most_supervised"] = longest
    others = {split: {"longest": 1} for split in ("validation", "test")}
    return merge(WHOLE, {"task": task, "labels": labels, "train": train, **others})


def refused(function, *args: object) -> str:
    with pytest.raises(UserError) as caught:
        function(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "run", "expected"),
    [
        # (steps an epoch, steps, rows unseen an epoch, accumulation)
        (160, {}, (10, 10, 0, 16)),
        (175, {}, (10, 10, 15, 16)),
        (16, {}, (1, 1, 0, 16)),
        (160, {"epochs": 3}, (10, 30, 0, 16)),
        (160, {"epochs": 0.25}, (10, 3, 0, 16)),
        (1600, {"epochs": 0.07}, (100, 7, 0, 16)),
        (160, {"epochs": 1.11}, (10, 12, 0, 16)),
        (160, {"epochs": 1e-9}, (10, 1, 0, 16)),
        (160, {"steps": 7}, (10, 7, 0, 16)),
        (160, {"steps": 700}, (10, 700, 0, 16)),
        (160, {"gpus": 4, "batch": {"global": 32, "micro": 2}}, (5, 5, 0, 4)),
        (100, {"gpus": 2, "batch": {"global": 8, "micro": 4}}, (12, 12, 4, 1)),
        (160, {"gpus": 4, "nodes": 2, "batch": {"global": 32, "micro": 2}}, (5, 5, 0, 2)),
    ],
)
def test_batch_and_steps(rows, run, expected) -> None:
    settings = settings_of(**run)
    micro = settings["batch"]["micro"]
    split = job(
        "qlora", world=settings["gpus"] * settings["nodes"], micro=1 if micro == "auto" else micro
    )
    steps_per_epoch, steps, unseen, accumulation = expected
    assert plan_run.batch_plan(settings, split, rows) == {
        "world_size": settings["gpus"] * settings["nodes"],
        "global_batch": settings["batch"]["global"],
        "micro_batch": split.micro,
        "accumulation": accumulation,
        "gradient_checkpointing": True,
        "steps_per_epoch": steps_per_epoch,
        "steps": steps,
        "rows_unseen_per_epoch": unseen,
    }


@pytest.mark.parametrize("rows", [1, 15])
def test_rows_that_do_not_fill_one_batch(rows) -> None:
    check_rows(16, 16)
    assert refused(check_rows, 16, rows) == (
        f"{rows} training rows do not fill one batch; set batch.global <= {rows}."
    )


@pytest.mark.parametrize(
    ("run", "parameters", "rate"),
    [
        ({}, 7e9, 2e-4),
        ({}, 13_015_864_320, 2e-4),  # LLaMA 13B, 2e-4 in table 9 of the QLoRA paper
        ({}, 32_528_943_616, 1e-4),  # LLaMA 33B, 1e-4 there
        ({"method": "lora"}, 7e9, 2e-4),
        ({"method": "full"}, 7e9, 1e-5),
        ({"method": "full"}, 70e9, 1e-5),
        ({"optimizer": {"learning_rate": 3e-4}}, 70e9, 3e-4),
        ({"method": "full", "optimizer": {"learning_rate": 5e-5}}, 1e9, 5e-5),
        (CLASSIFIER | {"method": "full"}, 0.1e9, 2e-5),
        (CLASSIFIER | {"method": "lora"}, 0.1e9, 2e-4),
    ],
)
def test_learning_rate(run, parameters, rate) -> None:
    assert plan_run.learning_rate(settings_of(**run), parameters) == rate


SHAPES = llama("LLaMA 7B")


def planned(gigabytes: float, longest: int = 512, **run: object) -> dict:
    settings = settings_of(gpu_memory_gb=gigabytes, **run)
    return plan_run.make_plan(settings, SHAPES, lint(longest))


def split_of(plan: dict) -> tuple[int, int, bool]:
    return plan["micro_batch"], plan["accumulation"], plan["gradient_checkpointing"]


@pytest.mark.parametrize(
    ("gigabytes", "run", "split"),
    [
        # no recomputing where one row fits without it
        (120, {}, (16, 1, False)),
        (50, {}, (8, 2, False)),
        (30, {}, (4, 4, False)),
        (14, {}, (2, 8, False)),
        (12, {}, (1, 16, False)),
        (9, {}, (4, 4, True)),
        (7, {}, (1, 16, True)),
        (9, {"batch": {"global": 15}}, (5, 3, True)),
        # divisors alone
        (80, {"batch": {"global": 12}, "gpus": 2}, (6, 1, False)),
        (40, {"batch": {"global": 10}}, (5, 2, False)),
        # what the user set stays
        (80, {"batch": {"micro": 2}}, (2, 8, False)),
        (80, {"gradient_checkpointing": True}, (16, 1, True)),
        (9, {"batch": {"micro": 1}}, (1, 16, True)),
    ],
)
def test_the_largest_micro_batch_that_divides_and_fits(gigabytes, run, split) -> None:
    plan = planned(gigabytes, **run)
    assert split_of(plan) == split
    assert plan["micro_batch"] * plan["accumulation"] * plan["world_size"] == plan["global_batch"]
    assert plan["memory"]["total"] <= plan["memory"]["available"]


def test_a_micro_batch_that_nobody_chose_leaves_a_tenth_free() -> None:
    total = planned(120)["memory"]["total"]
    assert planned(total / 0.9 / 1e9 + 1e-6)["micro_batch"] == 16
    assert planned(total / 0.9 / 1e9 - 1e-3)["micro_batch"] == 8
    assert planned(total / 1e9 + 1e-6, batch={"micro": 16})["micro_batch"] == 16


def test_memory_of_a_plan_is_the_sum_of_its_parts() -> None:
    memory = planned(24, gpus=2)["memory"]
    assert memory["total"] == sum(memory["parts"].values()) < memory["available"] == 24e9
    assert memory["device"] == "gpu_memory_gb"
    assert set(memory["host"]) == {"train", "merge", "evaluate"}
    assert {"train", "merge"} < set(memory["disk"])


def test_quantization_settings_reach_the_formula() -> None:
    run = {"batch": {"micro": 1}, "gradient_checkpointing": True}
    plain, double = (
        planned(24, quantization={"double": double}, **run)["memory"]["total"]
        for double in (False, True)
    )
    assert plain - double == pytest.approx(6_476_005_376 * 0.373 / 8 * 1.05, rel=1e-3)


def test_the_optimizer_of_the_settings_reaches_the_formula() -> None:
    run = {"method": "full", "launch": "ddp", "gradient_checkpointing": True}
    plain, small = (
        planned(200, **run, optimizer={"name": name})["memory"]["parts"]["optimizer"]
        for name in ("adamw", "adamw_8bit")
    )
    assert plain == pytest.approx(6_738_415_616 * 8)
    assert 0.25 < small / plain < 0.28


@pytest.mark.parametrize(
    ("gigabytes", "longest", "run", "change"),
    [
        (9, 512, {"batch": {"micro": 16}}, "`batch: {micro: 1}`"),
        (8, 512, {"gradient_checkpointing": False}, "`gradient_checkpointing: true`"),
        (
            *(8, 512, {"batch": {"micro": 2}, "gradient_checkpointing": False}),
            "`batch: {micro: 1}` and `gradient_checkpointing: true`",
        ),
        (8, 4096, {}, "`max_length: 3200`"),
        (80, 512, {"method": "full", "launch": "ddp", "gpus": 4}, "`launch: zero3`"),
        (100, 512, {"method": "full", "launch": "ddp"}, "`optimizer: {name: adamw_8bit}`"),
        (24, 512, {"method": "full", "launch": "zero2", "gpus": 2}, "`launch: zero3-offload`"),
        (12, 512, {"method": "lora"}, "`launch: zero3-offload`"),
    ],
)
def test_the_smallest_change_is_one_that_fits(gigabytes, longest, run, change) -> None:
    text = refused(lambda: planned(gigabytes, longest, **run))
    assert f"The smallest change that fits: {change}." in text


def test_what_a_refusal_says() -> None:
    text = refused(lambda: planned(12, method="lora"))
    assert text == (
        "needs about 16.2 GB on each GPU, but each has 12.0 (gpu_memory_gb). The largest part is "
        "weights (13.5 GB). The smallest change that fits: `launch: zero3-offload`."
    )
    assert refused(lambda: planned(2)).endswith("No single change fits.")


def test_oversubscription_is_allowed_with_a_warning(capsys) -> None:
    plan = planned(2, allow_oversubscription=True)
    assert plan["memory"]["total"] > plan["memory"]["available"]
    assert split_of(plan) == (1, 16, True)
    said = capsys.readouterr().err
    assert said.startswith("plan_run: WARNING: needs about ")
    assert "started all the same: allow_oversubscription" in said


EVALUATED = {"allow_oversubscription": False, "evaluation": {"gpus": 1}}


@pytest.mark.parametrize(
    ("gigabytes", "gpus", "needed"),
    # 6,738,415,616 weights of 2 bytes and a tenth: 14.82 GB
    [(15, 1, None), (14.8, 1, 2), (7.5, 2, None), (7.4, 2, 3), (4, 1, 4), (80, 8, None)],
)
def test_a_model_is_evaluated_where_it_fits(gigabytes, gpus, needed) -> None:
    settings = EVALUATED | {"evaluation": {"gpus": gpus}}
    device = Device(gigabytes * 1e9, "NVIDIA X")
    if needed is None:
        check_evaluation(settings, SHAPES, device)
        return
    assert refused(check_evaluation, settings, SHAPES, device) == (
        "the trained model could not be evaluated: 16-bit weights, and a tenth for what is "
        f"generated, take 14.8 GB, and `evaluation: {{gpus: {gpus}}}` gives it {gpus} x "
        f"{gigabytes:.1f} GB (NVIDIA X). Set `evaluation: {{gpus: {needed}}}` under the dataset. "
        "Or, to train and merge alone, set `allow_oversubscription: true` for the run, and give "
        "Snakemake `--until merge`."
    )


def test_a_model_that_is_only_trained_and_merged_is_warned_about(capsys) -> None:
    settings = EVALUATED | {"allow_oversubscription": True}
    check_evaluation(settings, SHAPES, Device(8e9, "NVIDIA X"))
    assert "WARNING: the trained model could not be evaluated: " in capsys.readouterr().err


def test_on_a_cpu_a_model_is_evaluated_by_one_process() -> None:
    check_evaluation(EVALUATED, SHAPES, Device(8e9, "no GPU seen", cpu=True))


def test_neighbours_leave_out_what_is_refused_and_mark_this_run() -> None:
    plan = planned(24, gpus=2)
    entries = plan["neighbours"]
    pairs = {(e["method"], e["launch"]) for e in entries}
    assert {launch for method, launch in pairs if method == "qlora"} == {"ddp"}
    assert len(pairs) == 1 + 4 + 4
    assert len({(e["method"], e["launch"], e["gpus"]) for e in entries}) == len(entries) == 36
    assert [e["this"] for e in entries] == [True] + [False] * 35
    assert (entries[0]["method"], entries[0]["gpus"]) == ("qlora", 2)
    assert entries[0]["gpu"] == plan["memory"]["total"]
    assert entries[0]["host"] == plan["memory"]["host"]["train"]
    assert all(e["fits"] == (e["gpu"] <= 24e9) == (e["change"] is None) for e in entries)
    lines = table(entries).splitlines()
    assert len(lines) == 37
    assert lines[1].startswith("->  qlora   ddp")


def test_neighbours_whose_gpus_do_not_divide_the_batch_are_left_out() -> None:
    assert {e["gpus"] for e in planned(24, batch={"global": 6})["neighbours"]} == {1, 2}


def test_neighbours_of_a_classifier() -> None:
    settings = settings_of(**CLASSIFIER, method="lora", gpu_memory_gb=80)
    plan = plan_run.make_plan(settings, SHAPES, lint(64, ["a", "b"]))
    assert {(e["method"], e["launch"]) for e in plan["neighbours"]} == {
        ("lora", "ddp"),
        ("full", "ddp"),
    }
    assert plan["memory"]["parts"]["logits"] == plan["micro_batch"] * 2 * 10


@pytest.mark.parametrize(("length", "rows"), [(64, [16, 8, 4, 2, 1]), (69, [8, 4, 2, 1])])
def test_cpu_processes_take_a_thousand_tokens_at_most(length, rows) -> None:
    run = job("qlora", length=length, cpu=True)
    assert micro_batches(run, 16) == rows
    assert micro_batches(replace(run, length=5000), 16) == [1]
    assert micro_batches(replace(run, cpu=False, length=5000), 16) == [16, 8, 4, 2, 1]


def test_cpu_processes_share_a_machine() -> None:
    request = Request(SHAPES, Device(100e9, "here", cpu=True), 16)
    assert request.room(job("qlora", world=4)).available == 25e9
    entries = neighbours(request, request.best(job("full", "ddp", 8, cpu=True)))
    assert "`gpus: " not in str([e["change"] for e in entries if e["gpus"] == 1])


def test_other_numbers_of_processes_divide_the_batch() -> None:
    request = Request(SHAPES, Device(100e9, "here", cpu=True), 12)
    run = job("qlora", world=6)
    fewer = [text for text, _ in others(request, replace(run, cpu=True))]
    assert fewer == ["`gpus: 4`", "`gpus: 3`", "`gpus: 2`", "`gpus: 1`"]
    assert [text for text, _ in others(request, run)] == ["`gpus: 12`"]


def test_several_nodes() -> None:
    """Advice keeps their number, and what a machine must hold is for its own processes."""
    device = Device(100e9, "here")
    run = job_of(settings_of(gpus=2, nodes=3, batch={"global": 12}), SHAPES, lint(), device)
    assert (run.world, run.per_node) == (6, 2)
    more = [
        (text, new.world, new.per_node) for text, new in others(Request(SHAPES, device, 12), run)
    ]
    assert more == [("`gpus: 4`", 12, 4)]


def fake_torch(gigabytes: float | None) -> SimpleNamespace:
    device = SimpleNamespace(total_memory=int((gigabytes or 0) * 1e9), name="NVIDIA H200")
    cuda = SimpleNamespace(
        is_available=lambda: gigabytes is not None, get_device_properties=lambda index: device
    )
    return SimpleNamespace(cuda=cuda)


def test_what_is_told_goes_before_what_is_seen(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(141))
    assert find_device(settings_of()) == Device(141e9, "NVIDIA H200")
    assert find_device(settings_of(gpu_memory_gb=24)) == Device(24e9, "gpu_memory_gb")
    told = find_device(settings_of(gpu_model="a100-80"))
    assert told == Device(GPU_MODELS["a100-80"] * 2**30, "gpu_model a100-80")


def test_without_a_gpu_the_plan_is_for_cpu_processes(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(None))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("finetune.devices.cgroup_limit", lambda: 30_000_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64_000_000_000))
    assert find_device(settings_of()).available == 30e9
    text = refused(plan_run.make_plan, settings_of(method="full", gpus=2), SHAPES, lint(64))
    assert "GB on each process, but each has 15.0 (no GPU seen: CPU processes share 30.0" in text
    assert text.endswith(
        "If it is to run on GPUs, say which: `gpu_model: h100`, or `gpu_memory_gb`."
    )
    # SLURM limits the job that plans, and not the one that will train
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert machine_memory() == 64e9


def test_limits_of_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "self"
    own.write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert cgroup_limit(tmp_path, own) is None
    (tmp_path / "a" / "memory.max").write_text("4000\n")
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    assert cgroup_limit(tmp_path, own) == 4000


def test_packs_are_as_long_as_they_are_and_supervised_throughout() -> None:
    """pack_split says anew how long rows are."""
    packed = lint(4096) | {"packing": {"used": True}}
    run = job_of(settings_of(), SHAPES, packed, Device(80e9, ""))
    assert (run.length, run.supervised, run.attention) == (4096, 4096, "sdpa")


@pytest.mark.parametrize(("longest", "attention"), [(256, "eager"), (257, "sdpa")])
def test_attention_on_a_cpu_is_by_length(longest, attention) -> None:
    run = job_of(settings_of(), SHAPES, lint(longest), Device(80e9, "", True))
    assert run.attention == attention


@pytest.mark.parametrize(("context", "longest"), [(2048, 2048), (2048, 1), (None, 10**6)])
def test_rows_within_the_context(context, longest) -> None:
    check_context(context, longest)


def test_row_longer_than_the_context() -> None:
    assert refused(check_context, 2048, 2049) == (
        "the longest row has 2049 tokens, but the model's context is 2048; set max_length under "
        "the dataset to at most that."
    )


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Run the rule's script; what it wrote. The model is LLaMA 7B, of which only a config lies
    there."""
    llama_config("LLaMA 7B").save_pretrained(tmp_path / "pretrained")
    record = {"context": 2048}

    def run(rows: int, longest: int, labels: list[str] | None = None, **keys: object) -> dict:
        (tmp_path / "model.json").write_text(json.dumps(record))
        (tmp_path / "lint.json").write_text(json.dumps(lint(longest, labels, rows)))
        command = ["plan_run.py", "--settings", json.dumps(settings_of(**keys))]
        for name in ("model", "lint"):
            command += [f"--{name}", str(tmp_path / f"{name}.json")]
        command += ["--pretrained", str(tmp_path / "pretrained")]
        command += ["--calibration", str(tmp_path / "calibration.jsonl")]
        monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "plan.json")])
        plan_run.main()
        return json.loads((tmp_path / "plan.json").read_text())

    return run


def test_plan_of_a_run(plan, capsys) -> None:
    batch = {"global": 8, "micro": 2}
    written = plan(100, 512, gpus=2, batch=batch, gpu_memory_gb=24, epochs=2)
    memory, settings = written.pop("memory"), written.pop("settings")
    others = written.pop("neighbours")
    assert settings["batch"] == batch
    assert written == {
        "world_size": 2,
        "global_batch": 8,
        "micro_batch": 2,
        "accumulation": 2,
        "gradient_checkpointing": False,
        "steps_per_epoch": 12,
        "steps": 24,
        "rows_unseen_per_epoch": 4,
        "learning_rate": 2e-4,
        "time": None,
    }
    assert memory["total"] == sum(memory["parts"].values())
    said = capsys.readouterr().err
    assert said.startswith(table(others))
    assert said.endswith(
        f"plan_run: 24 steps of 8 rows = 2 x 2 x 2; {memory['total'] / 1e9:.1f} of 24.0 GB for "
        "each predicted (gpu_memory_gb), uncalibrated\n"
    )


@pytest.mark.parametrize(
    ("rows", "longest", "keys"),
    [
        (5, 9, {}),
        (100, 3000, {"gpu_memory_gb": 80}),
        (100, 9, {"gpu_memory_gb": 2}),
        (100, 9, {"gpu_memory_gb": 14}),  # enough to train in 4 bit, and to evaluate nothing
    ],
)
def test_refused_run_leaves_no_plan(rows, longest, keys, plan, tmp_path) -> None:
    with pytest.raises(UserError):
        plan(rows, longest, **keys)
    assert not (tmp_path / "plan.json").exists()


def test_target_modules_that_the_model_lacks_are_named_before_a_gpu_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"target_modules query: no such linear layer.*q_proj"):
        planned(80, lora={"target_modules": ["q_proj", "query"]})


def test_experts_are_adapted_without_dropout_alone() -> None:
    """peft refuses it only when the model has been loaded."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shapes = shapes_of(AutoModelForCausalLM.from_config(CONFIGS["mixtral"](1)))
    for lora, refusal in (
        ({}, True),
        ({"dropout": 0}, False),
        ({"target_modules": ["q_proj"]}, False),
    ):
        settings = settings_of(lora=lora, gpu_memory_gb=80)
        if refusal:
            assert "set `lora: {dropout: 0}`" in refused(
                plan_run.make_plan, settings, shapes, lint(64)
            )
        else:
            plan_run.make_plan(settings, shapes, lint(64))


def test_labelled_rows_and_a_classifier_belong_together() -> None:
    check_task("sequence-classification", lint(labels=["a", "b"]))
    check_task("causal-lm", lint())


@pytest.mark.parametrize(
    ("task", "lint", "text"),
    [
        (
            *("causal-lm", lint(labels=["a", "b"])),
            "this data set has a label for each row: set `task: sequence-classification` for the "
            "run. Or, to have the label written as text, map the columns under the dataset: "
            "`format: prompt-completion`, `columns: {prompt: text, completion: label}`.",
        ),
        (
            *("sequence-classification", lint()),
            "task sequence-classification needs a label for each row, and this data set has none. "
            "Give it the columns `text` and `label`, or map yours under the dataset: `format: "
            "text-label`, `columns: {text: …, label: …}`.",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused(task, lint, text) -> None:
    assert refused(check_task, task, lint) == text


def test_steps_count_sequences_and_not_rows(plan) -> None:
    """lint() has ten times as many rows: what is packed into them."""
    assert plan(160, 9, gpu_memory_gb=80)["steps"] == 10


def test_plan_of_a_text_with_labels(plan) -> None:
    with pytest.raises(UserError, match="set `task: sequence-classification`"):
        plan(160, 9, ["a", "b"], method="full")


def outlook(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = Path(plan_run.__file__)
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_what_would_fit_without_a_run(tmp_path: Path) -> None:
    CONFIGS["gqa"](2).save_pretrained(tmp_path)
    asked = ("--gpus", "4", "--gpu-memory", "24", "--method", "full", "--length", "512")
    done = outlook("--model", str(tmp_path / "config.json"), *asked)
    assert done.returncode == 0, done.stderr
    first, header, this, *others = done.stdout.splitlines()
    assert first.endswith("rows of 512 tokens, all supervised; gpu_memory_gb, 24.0 GB")
    assert header.split()[:3] == ["method", "launch", "gpus"]
    assert this.split()[:4] == ["->", "full", "zero3", "4"]
    assert len(others) == 35


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--gpus", "0"], "gpus: should be greater than or equal to 1 (found 0)"),
        (["--gpu-memory", "0"], "gpu_memory_gb: should be greater than 0 (found 0.0)"),
        (["--length", "0"], "max_length: should be greater than or equal to 2 (found 0)"),
        (["--gpus", "3"], "batch.global 16 is not a multiple of batch.micro 1 x 3 GPUs = 3."),
        (["--gpu-memory", "9", "--gpu-model", "l4"], "set `gpu_memory_gb` or `gpu_model`, not"),
        (["--length", "513"], "the longest row has 513 tokens, but the model's context is 512"),
    ],
)
def test_what_is_asked_wrongly_without_a_run(asked, said, tmp_path, monkeypatch) -> None:
    LlamaConfig(max_position_embeddings=512, num_hidden_layers=1).save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plan_run.py", "--model", str(tmp_path), *asked])
    assert refused(plan_run.main).startswith(said)


def test_the_rank_is_that_of_all_rows_of_adapters(tmp_path, monkeypatch, capsys) -> None:
    """Whatever the method that was asked about."""
    llama_config("LLaMA 7B").save_pretrained(tmp_path)

    def table_of(*options: str) -> set[str]:
        command = ["plan_run.py", "--model", str(tmp_path), "--gpu-memory", "80", *options]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(plan_run.cli, "terminal", sys.stdout)
        plan_run.main()
        lines = capsys.readouterr().out.splitlines()[2:]
        return {line.replace("->", "  ") for line in lines}

    full, qlora = (table_of("--lora-rank", "256", "--method", x) for x in ("full", "qlora"))
    assert full == qlora
    assert full != table_of("--method", "full")


RULE = [word for name in plan_run.RULE for word in (f"--{name}", "{}")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpus", "2", "--lora-rank", "8", *RULE), "--gpus, --lora-rank: not beside --settings"),
        (
            ("--lint", "lint.json", "--output", "plan.json"),
            "--lint, --output: only with --settings",
        ),
        (RULE[:4], "--settings needs --lint, --calibration, --output"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, said, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["plan_run.py", "--model", "model.json", *options])
    with pytest.raises(SystemExit) as end:
        plan_run.main()
    assert end.value.code == 2
    assert f"error: {said}" in capsys.readouterr().err


def test_rows_are_no_longer_than_the_context_unless_asked(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    LlamaConfig(max_position_embeddings=512, num_hidden_layers=1).save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plan_run.py", "--model", str(tmp_path)])
    plan_run.main()
    said = capsys.readouterr().out
    assert "rows of 512 tokens" in said
    assert " GB (for GPUs: --gpu-memory or --gpu-model)\n" in said


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (BertConfig, "BertModel writes no text"),
        (MambaConfig, "MambaForCausalLM does not say how many attention heads it has"),
        (T5Config, "T5Model writes no text"),
    ],
)
def test_a_model_that_cannot_be_planned_with(config, said, tmp_path) -> None:
    small = config(num_hidden_layers=1)
    small.architectures = ["BertModel"] if config is BertConfig else None
    small.save_pretrained(tmp_path)
    text = refused(shapes_in, str(tmp_path), False)
    assert text.startswith(f"{tmp_path} cannot be planned with: {said}")
    assert len(text) < 400


def test_a_model_of_the_hub_that_cannot_be_planned_with(monkeypatch) -> None:
    """Its config was found."""

    def no_outline(*_: object) -> None:
        raise ValueError("no class for it")

    monkeypatch.setattr(architecture, "outline", no_outline)
    assert refused(shapes_in, "org/name", False) == (
        "org/name cannot be planned with: no class for it"
    )


def test_a_model_that_is_not_here() -> None:
    assert refused(shapes_in, "org/none", False) == (
        "org/none: no such folder or file here, and HF_HUB_OFFLINE is set. Give a folder, a "
        "config.json, or the id of a hub model (of a gated one after `hf auth login`)."
    )


@pytest.mark.parametrize("classes", [None, 2])
def test_advice_and_table_know_no_other_pairs_than_the_config(classes) -> None:
    task = {"task": "sequence-classification"} if classes else {}
    for method, launch in product(get_args(Method), get_args(Launch)):
        run = NAMES | task | {"method": method, "launch": launch}
        try:
            Run.model_validate(run)
        except ValidationError:
            assert not allowed(method, launch, classes)
        else:
            assert allowed(method, launch, classes)
