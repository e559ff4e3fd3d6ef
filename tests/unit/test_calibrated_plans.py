"""A plan with earlier runs of its kind: what it predicts, refuses and lets start."""

import pytest

import plan_run
from finetune import outlook
from finetune.calibration import Finished, append
from finetune.cli import UserError
from finetune.config import Dataset, Model, Run, complete_run
from finetune.outlook import shapes_in
from finetune.stages import plan_settings

GB = 10**9
LENGTH = 200
LINT = {
    "train": {"longest": LENGTH, "sequences": 100, "tokens": 5000, "most_supervised": LENGTH},
    "validation": {"longest": LENGTH},
    "labels": None,
}


def settings(**keys):
    run = complete_run({}, {"model": "m", "dataset": "d", "method": "full", "launch": "ddp"} | keys)
    return plan_settings(Run.model_validate(run), Dataset(source="-"), Model(source="-"))


def earlier(*gpu, **changes):
    """A run for each number: what its GPU held where 100 bytes were predicted."""
    return [
        Finished(
            **{
                "run": str(number),
                "settings_digest": "",
                "model": "m",
                "device": "H100",
                "method": "full",
                "launch": "ddp",
                "gradient_checkpointing": False,
                "world_size": 1,
                "micro_batch": 1,
                "length": LENGTH,
                "predicted": {"process": 100, "node": 1000},
                "measured": {"process": number, "node": 700},
                "tokens_per_second": 50.0,
                "training_seconds": 20.0,
                "other_seconds": 30.0,
            }
            | changes
        )
        for number in gpu
    ]


@pytest.fixture(scope="module")
def shapes(tiny_model):
    return shapes_in(tiny_model, False)


@pytest.fixture
def plan(shapes):
    def make(runs=(), memory=80.0, micro=1, **keys):
        keys |= {"gpu_memory_gb": memory, "batch": {"global": 16, "micro": micro}}
        return plan_run.make_plan(settings(**keys), shapes, LINT, runs)

    return make


def test_without_earlier_runs_it_says_so(plan):
    made = plan()
    assert made["memory"]["calibration"] == {"process": None, "node": None}
    assert made["time"] is None
    assert plan_run.summary(made).endswith(", uncalibrated")


def test_the_raw_prediction_stands_beside_the_corrected_one(plan):
    raw = plan()["memory"]
    made = plan(earlier(120, 130, 150))
    memory, found = made["memory"], made["memory"]["calibration"]
    assert (memory["total"], memory["host"]) == (raw["total"], raw["host"])
    assert found["process"] == {
        "median": 1.3,
        "low": 1.2,
        "high": 1.5,
        "runs": 3,
        "alike": ("on", "method", "launch", "gradient_checkpointing", "model"),
        "corrected": round(raw["total"] * 1.3),
    }
    assert found["node"]["corrected"] == round(raw["host"]["train"] * 0.7)
    said = plan_run.summary(made)
    assert "corrected by earlier runs: 3, measured / predicted 1.20 to 1.50; about 2 min" in said


def test_time_is_that_of_all_steps(plan):
    """6 steps of 16 rows, of 50 tokens on average; 50 tokens a second, and 30 seconds besides."""
    time = plan(earlier(100))["time"]
    assert (time["tokens"], time["seconds"]) == (4800, 4800 / 50 + 30)
    assert plan(earlier(100), steps=12)["time"]["tokens"] == 9600


def test_what_earlier_runs_did_not_fit_is_refused(plan):
    needed = plan()["memory"]["total"]
    between = 1.2 * needed / GB
    assert plan(memory=between)["memory"]["calibration"]["process"] is None
    with pytest.raises(
        UserError, match=r"From shapes alone it would be .* GB; .*calibration.jsonl"
    ):
        plan(earlier(150), memory=between)


def test_a_refusal_that_earlier_runs_lift_is_not_lifted_in_silence(plan, capsys):
    needed = plan()["memory"]["total"]
    between = 0.8 * needed / GB
    with pytest.raises(UserError, match="needs about"):
        plan(memory=between)
    capsys.readouterr()
    made = plan(earlier(60, 70, 70), memory=between)
    assert made["memory"]["total"] > made["memory"]["available"]
    said = capsys.readouterr().err
    assert "WARNING: From shapes alone it would be" in said
    assert "3 earlier runs of its kind took 0.70 times what was predicted (0.60 to 0.70)" in said
    assert "That would be refused" in said


def test_a_batch_that_is_free_to_choose_is_chosen_by_the_corrected_size(plan):
    whole = plan(micro="auto", gradient_checkpointing=False)
    assert whole["micro_batch"] == 16
    room = whole["memory"]["total"] / 0.9 * 1.015 / GB
    assert plan(micro="auto", gradient_checkpointing=False, memory=room)["micro_batch"] == 16
    corrected = plan(earlier(101), memory=room, micro="auto", gradient_checkpointing=False)
    assert corrected["micro_batch"] == 16
    corrected = plan(earlier(102), memory=room, micro="auto", gradient_checkpointing=False)
    assert corrected["micro_batch"] == 8


def test_runs_of_other_kinds_correct_nothing(plan):
    for other in ({"method": "lora"}, {"launch": "zero2"}, {"device": "CPU"}):
        assert plan(earlier(150, **other))["memory"]["calibration"]["process"] is None


def test_damaged_lines_are_said_and_stop_no_plan(tmp_path, capsys):
    path = tmp_path / "calibration.jsonl"
    assert plan_run.earlier_runs(path) == []
    path.write_text('{"run": "cut sh\n')
    append(path, earlier(110)[0])
    assert plan_run.earlier_runs(path) == earlier(110)
    assert f"{path}: 1 damaged lines are not used" in capsys.readouterr().err


@pytest.mark.parametrize("told", [{"gpu_memory_gb": 80.0}, {"gpu_model": "h100"}])
def test_a_gpu_that_is_only_told_of_has_no_name(told, shapes):
    keys = settings(**told)
    runs = outlook.earlier_of(keys, outlook.Device(80e9, "gpu_model h100"), [])
    assert (runs.device, runs.on, runs.model) == (None, "gpu", "m")


def test_a_gpu_that_is_seen_and_a_cpu_have_the_names_of_their_records(shapes):
    seen = outlook.earlier_of(settings(), outlook.Device(80e9, "NVIDIA H100"), [])
    assert (seen.device, seen.on) == ("NVIDIA H100", "gpu")
    cpu = outlook.earlier_of(settings(), outlook.Device(80e9, "no GPU seen", cpu=True), [])
    assert (cpu.device, cpu.on) == ("CPU", "cpu")
