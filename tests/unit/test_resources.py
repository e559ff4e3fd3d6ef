"""What jobs ask for, by hand from a plan."""

import pytest

from finetune.resources import baseline_mem_mb, disk_mb, mem_mb, merge_minutes, train_minutes

GB = 10**9
PLAN = {
    "world_size": 2,
    "memory": {
        "total": 1 * GB,
        "host": {"train": 20 * GB, "merge": 50 * GB, "evaluate": 10 * GB},
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
        ("evaluate", 1, 11_500),
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


def test_a_base_model_is_sized_by_its_record():
    """7 B parameters: (3 + 14 GB) x 1.1 + 500 MB."""
    model = {"parameters": 7 * GB}
    assert baseline_mem_mb(model, 1) == 19_200
    assert baseline_mem_mb(model, 2) == 28_800
