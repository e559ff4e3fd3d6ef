"""Rule plan_run: steps, learning rate, memory against the GPU, and what it refuses."""

import json
import sys
from types import SimpleNamespace

import pytest
from test_memory import llama_7b

import plan_run
from finetune.cli import UserError
from finetune.config import Dataset, Run, complete_run, merge
from finetune.stages import plan_settings
from lint_record import WHOLE

NAMES = {"model": "m", "dataset": "d"}
CLASSIFIER = {"task": "sequence-classification"}


def settings_of(**run: object) -> dict:
    """As the rule passes them: through the config and JSON."""
    chosen = Run.model_validate(complete_run({}, NAMES | run))
    settings = plan_settings(chosen, Dataset(source="rows.jsonl"))
    return json.loads(json.dumps(settings))


def lint(longest: int = 512, labels: list[str] | None = None, sequences: int = 100) -> dict:
    """lint.json, as far as it is read: of labelled rows if there are labels."""
    task = "causal-lm" if labels is None else "sequence-classification"
    train = {"rows": 10 * sequences, "sequences": sequences, "longest": longest}
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
    steps_per_epoch, steps, unseen, accumulation = expected
    assert plan_run.batch_plan(settings, rows) == {
        "world_size": settings["gpus"] * settings["nodes"],
        "global_batch": settings["batch"]["global"],
        "micro_batch": settings["batch"]["micro"],
        "accumulation": accumulation,
        "steps_per_epoch": steps_per_epoch,
        "steps": steps,
        "rows_unseen_per_epoch": unseen,
    }


@pytest.mark.parametrize("rows", [1, 15])
def test_rows_that_do_not_fill_one_batch(rows) -> None:
    assert refused(plan_run.batch_plan, settings_of(), rows) == (
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


def fits(gigabytes: float, **run: object) -> dict:
    return plan_run.memory_plan(settings_of(gpu_memory_gb=gigabytes, **run), llama_7b(), lint(512))


def test_qlora_of_7b_fits_a_gpu_of_12_gb() -> None:
    plan = fits(12)
    assert plan["total"] == sum(plan["parts"].values())
    assert 5e9 < plan["total"] < plan["available"] == 12e9
    assert plan["device"] == "gpu_memory_gb"


def test_quantization_settings_reach_the_formula() -> None:
    saved = fits(12, quantization={"double": False})["total"] - fits(12)["total"]
    assert saved == pytest.approx(6_476_005_376 * 0.373 / 8 * 1.05, rel=1e-3)


@pytest.mark.parametrize(
    ("gigabytes", "run", "text"),
    [
        (
            15,
            {"method": "full", "gpus": 8},
            "needs about 15.4 GB on each GPU, but each has 15.0 (gpu_memory_gb). The largest part "
            "is optimizer. Try: `launch: zero3-offload`, more gpus, `method: qlora`.",
        ),
        (
            80,
            {"method": "full", "launch": "ddp"},
            "needs about 114.5 GB on each GPU, but each has 80.0 (gpu_memory_gb). The largest "
            "part is optimizer. Try: `launch: zero3`, more gpus, `method: qlora`.",
        ),
        (
            12,
            {"method": "lora"},
            "needs about 16.1 GB on each GPU, but each has 12.0 (gpu_memory_gb). The largest "
            "part is weights. Try: `method: qlora`.",
        ),
        (
            8,
            {"batch": {"micro": 8}, "gradient_checkpointing": False},
            "needs about 37.4 GB on each GPU, but each has 8.0 (gpu_memory_gb). The largest part "
            "is activations. Try: `gradient_checkpointing: true`, `batch: {micro: 1}` (the result "
            "stays the same), a shorter max_length.",
        ),
    ],
)
def test_run_that_does_not_fit(gigabytes, run, text) -> None:
    assert refused(lambda: fits(gigabytes, **run)) == text


def test_exactly_what_is_there_fits() -> None:
    total = fits(100)["total"]
    assert fits(total / 1e9)["total"] == total
    assert refused(lambda: fits((total - 1000) / 1e9)).startswith("needs about")


OFFLOAD, MORE, QLORA = "`launch: zero3-offload`", "more gpus", "`method: qlora`"
CHECKPOINT = "`gradient_checkpointing: true`"
MICRO = "`batch: {micro: 1}` (the result stays the same)"


@pytest.mark.parametrize(
    ("run", "largest", "advice"),
    [
        ({}, "weights", "a shorter max_length"),
        ({}, "logits", "a shorter max_length"),
        ({"batch": {"micro": 2}}, "weights", MICRO),
        ({"gradient_checkpointing": False}, "weights", CHECKPOINT),
        ({"method": "lora"}, "weights", QLORA),
        ({"method": "lora"}, "activations", f"{QLORA}, a shorter max_length"),
        ({"method": "full", "launch": "ddp"}, "weights", f"`launch: zero3`, {MORE}, {QLORA}"),
        ({"method": "full", "launch": "zero2"}, "weights", f"`launch: zero3`, {MORE}, {QLORA}"),
        ({"method": "full", "launch": "zero3"}, "weights", f"{OFFLOAD}, {MORE}, {QLORA}"),
        # offload is the last resort: plain zero3 would need more
        ({"method": "full", "launch": "zero3-offload"}, "weights", f"{MORE}, {QLORA}"),
    ],
)
def test_advice(run, largest, advice) -> None:
    parts = dict.fromkeys(("weights", "activations", "logits"), 1) | {largest: 2}
    text = plan_run.cheaper(settings_of(**run), parts)
    assert text == f"The largest part is {largest}. Try: {advice}."


def fake_torch(gigabytes: float | None) -> SimpleNamespace:
    device = SimpleNamespace(total_memory=int((gigabytes or 0) * 1e9), name="NVIDIA H200")
    cuda = SimpleNamespace(
        is_available=lambda: gigabytes is not None, get_device_properties=lambda index: device
    )
    return SimpleNamespace(cuda=cuda)


def test_memory_of_the_gpu_that_is_here(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(141))
    assert plan_run.device_memory(settings_of()) == (141e9, "NVIDIA H200")
    assert plan_run.device_memory(settings_of(gpu_memory_gb=24)) == (24e9, "gpu_memory_gb")
    monkeypatch.setitem(sys.modules, "torch", fake_torch(4))
    assert "but each has 4.0 (NVIDIA H200)" in refused(
        plan_run.memory_plan, settings_of(), llama_7b(), lint(512)
    )


def test_without_a_gpu_nothing_is_refused_for_memory(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(None))
    plan = plan_run.memory_plan(settings_of(method="full", launch="ddp"), llama_7b(), lint(2048))
    assert plan["available"] is None
    assert plan["device"] == "no GPU seen here; set gpu_memory_gb to have it checked"


@pytest.mark.parametrize(("context", "longest"), [(2048, 2048), (2048, 1), (None, 10**6)])
def test_rows_within_the_context(context, longest) -> None:
    plan_run.check_context({"context": context}, longest)


def test_row_longer_than_the_context() -> None:
    assert refused(plan_run.check_context, {"context": 2048}, 2049) == (
        "the longest row has 2049 tokens, but the model's context is 2048; set max_length under "
        "the dataset to at most that."
    )


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Run the rule's script; what it wrote."""

    def run(rows: int, longest: int, labels: list[str] | None = None, **keys: object) -> dict:
        (tmp_path / "model.json").write_text(json.dumps(llama_7b()))
        (tmp_path / "lint.json").write_text(json.dumps(lint(longest, labels, rows)))
        command = ["plan_run.py", "--settings", json.dumps(settings_of(**keys))]
        for name in ("model", "lint"):
            command += [f"--{name}", str(tmp_path / f"{name}.json")]
        monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "plan.json")])
        plan_run.main()
        return json.loads((tmp_path / "plan.json").read_text())

    return run


def test_plan_of_a_run(plan, capsys) -> None:
    written = plan(100, 512, gpus=2, batch={"global": 8, "micro": 2}, gpu_memory_gb=24, epochs=2)
    memory, settings = written.pop("memory"), written.pop("settings")
    assert settings["batch"] == {"global": 8, "micro": 2}
    assert written == {
        "world_size": 2,
        "global_batch": 8,
        "micro_batch": 2,
        "accumulation": 2,
        "steps_per_epoch": 12,
        "steps": 24,
        "rows_unseen_per_epoch": 4,
        "learning_rate": 2e-4,
    }
    assert memory["total"] == sum(memory["parts"].values())
    assert capsys.readouterr().err == (
        "plan_run: 24 steps of 8 rows = 2 x 2 x 2; 6.4 GB per GPU predicted\n"
    )


@pytest.mark.parametrize(
    ("rows", "longest", "keys"),
    [(5, 9, {}), (100, 3000, {"gpu_memory_gb": 80}), (100, 9, {"gpu_memory_gb": 2})],
)
def test_refused_run_leaves_no_plan(rows, longest, keys, plan, tmp_path) -> None:
    with pytest.raises(UserError):
        plan(rows, longest, **keys)
    assert not (tmp_path / "plan.json").exists()


def test_target_modules_that_the_model_lacks_are_named_before_a_gpu_is_asked_for() -> None:
    settings = settings_of(lora={"target_modules": ["q_proj", "query"]})
    with pytest.raises(UserError, match=r"target_modules query: no such linear layer.*q_proj"):
        plan_run.memory_plan(settings, llama_7b(), lint(64))


LLAMA, BERT = {"causal": True}, {"causal": False, "architecture": "BertModel"}


@pytest.mark.parametrize("model", [LLAMA, BERT])
def test_labelled_rows_and_a_classifier_belong_together(model) -> None:
    plan_run.check_task("sequence-classification", model, lint(labels=["a", "b"]))
    plan_run.check_task("causal-lm", LLAMA, lint())


@pytest.mark.parametrize(
    ("task", "model", "lint", "text"),
    [
        (
            *("causal-lm", LLAMA, lint(labels=["a", "b"])),
            "this data set has a label for each row: set `task: sequence-classification` for the "
            "run. Or, to have the label written as text, map the columns under the dataset: "
            "`format: prompt-completion`, `columns: {prompt: text, completion: label}`.",
        ),
        (
            *("sequence-classification", LLAMA, lint()),
            "task sequence-classification needs a label for each row, and this data set has none. "
            "Give it the columns `text` and `label`, or map yours under the dataset: `format: "
            "text-label`, `columns: {text: …, label: …}`.",
        ),
        (
            *("causal-lm", BERT, lint()),
            "BertModel writes no text, so it cannot be trained for `task: causal-lm`. Use it for "
            "`sequence-classification`, or choose a causal language model.",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused(task, model, lint, text) -> None:
    assert refused(plan_run.check_task, task, model, lint) == text


def test_a_classifier_has_logits_for_its_classes_once_a_row() -> None:
    run = CLASSIFIER | {"method": "lora", "batch": {"micro": 4}}
    labelled = lint(512, ["a", "b", "c"])
    classes = plan_run.memory_plan(settings_of(**run), llama_7b(), labelled)["parts"]
    words = plan_run.memory_plan(settings_of(**run), llama_7b(), lint(512))["parts"]
    assert classes.pop("logits") == 4 * 3 * 10
    assert words.pop("logits") == 4 * 512 * 32_000 * 10
    assert classes.pop("allowance") < words.pop("allowance")
    assert classes == words


@pytest.mark.parametrize(
    ("method", "largest", "advice"),
    [
        ("full", "optimizer", "`method: lora`"),
        ("full", "activations", "`method: lora`, a shorter max_length"),
        ("lora", "weights", "a shorter max_length"),
    ],
)
def test_advice_for_a_classifier_names_only_what_it_can_use(method, largest, advice) -> None:
    parts = dict.fromkeys(("weights", "activations", "optimizer"), 1) | {largest: 2}
    text = plan_run.cheaper(settings_of(**CLASSIFIER, method=method), parts)
    assert text == f"The largest part is {largest}. Try: {advice}."


def test_steps_count_sequences_and_not_rows(plan) -> None:
    """lint() has ten times as many rows: what is packed into them."""
    assert plan(160, 9)["steps"] == 10


def test_plan_of_a_classifier(plan) -> None:
    written = plan(160, 9, ["a", "b"], **CLASSIFIER, method="full")
    assert (written["learning_rate"], written["steps"]) == (2e-5, 10)
    with pytest.raises(UserError, match="set `task: sequence-classification`"):
        plan(160, 9, ["a", "b"], method="full")
