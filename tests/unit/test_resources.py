"""What jobs ask for, by hand from a plan."""

from dataclasses import asdict

import pytest

from finetune.config import Evaluation
from finetune.resources import disk_mb, evaluation_mb, mem_mb, merge_minutes, train_minutes
from truths import llama

GB = 10**9
PLAN = {
    "world_size": 2,
    "memory": {
        "total": 1 * GB,
        "host": {"train": 20 * GB, "merge": 50 * GB},
        "disk": {"train": 3 * GB, "merge": 2 * GB},
        "calibration": {"process": None, "node": None},
    },
    "time": None,
}


@pytest.mark.parametrize(
    ("stage", "attempt", "mb"),
    [
        ("train", 1, 22_500),  # 20,000 x 1.1 + 500
        ("train", 2, 33_750),
        ("train", 3, 45_000),
        ("merge", 1, 55_500),
    ],
)
def test_memory_is_that_of_the_plan_and_grows_with_each_try(stage, attempt, mb):
    assert mem_mb(PLAN, stage, attempt) == mb


def test_earlier_trainings_correct_the_memory_of_training_alone():
    calibration = {"node": {"corrected": 10 * GB}}
    plan = PLAN | {"memory": PLAN["memory"] | {"calibration": calibration}}
    assert mem_mb(plan, "train", 1) == 11_500
    assert mem_mb(plan, "merge", 1) == 55_500


def test_disk():
    assert [disk_mb(PLAN, stage) for stage in ("train", "merge")] == [3300, 2200]


def test_time_is_half_as_much_again_and_what_a_start_takes():
    assert train_minutes(PLAN) is None
    assert train_minutes(PLAN | {"time": {"seconds": 3601}}) == 10 + 91  # 90.025 minutes


def test_a_large_model_merges_for_longer():
    assert merge_minutes(PLAN) == 200
    memory = PLAN["memory"] | {"host": {"merge": 5 * GB}}
    assert merge_minutes(PLAN | {"memory": memory}) == 120


MODEL = {"parameters": 7 * GB, "shapes": asdict(llama("LLaMA 7B"))}
LINT = {"labels": None, "test": {"longest": 1000}}
TOKEN = 32 * 2 * 4096 * 2
"""Bytes of keys and values: LLaMA 7B has 32 layers of 4096."""


def on_cpu(lint: dict = LINT, model: dict = MODEL, attempt: int = 1, **evaluation: int) -> int:
    return evaluation_mb(model, lint, Evaluation(**evaluation), True, attempt)


def test_on_a_gpu_a_model_goes_through_host_memory():
    """7 B parameters: (3 + 14 GB) x 1.1 + 500 MB."""
    chosen = Evaluation(batch_size=64)
    assert evaluation_mb(MODEL, LINT, chosen, False, 1) == 19_200
    assert evaluation_mb(MODEL, LINT, chosen, False, 2) == 28_800


@pytest.mark.parametrize(("rows", "answer"), [(1, 256), (4, 24), (4, 256)])
def test_on_a_cpu_it_is_what_the_batch_makes_of_it_too(rows, answer):
    """Weights, keys and values of prompts and answers, and the widest layer or a piece of logits:
    11008 x 3 of 16 bit and 14 x 4096 a token."""
    logits = min(rows * 1000 * 32_000, 2**25) * 4
    layer = max(rows * 1000 * (11008 * 3 * 2 + 14 * 4096), logits)
    size = 700_000_000 + 14 * GB + rows * (1000 + answer) * TOKEN + layer
    found = on_cpu(batch_size=rows, max_new_tokens=answer)
    assert found == round(size * 1.1 / 1e6 + 500)


def test_no_answer_is_longer_than_the_context():
    """2048 tokens: 1048 of them after the prompt."""
    assert on_cpu(max_new_tokens=9000) == on_cpu(max_new_tokens=1048) > on_cpu(max_new_tokens=1047)


def test_a_classifier_writes_nothing():
    labelled = LINT | {"labels": ["a", "b"]}
    size = 700_000_000 + 14 * GB + 16 * 1000 * (11008 * 3 * 2 + 14 * 4096)
    assert on_cpu(labelled, max_new_tokens=9) == round(size * 1.1 / 1e6 + 500)


def test_a_model_that_no_run_is_planned_with_counts_as_its_weights():
    assert on_cpu(model=MODEL | {"shapes": None}) == round(14_700 * 1.1 + 500)
