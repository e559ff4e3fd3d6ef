"""What earlier runs teach a plan: which of them count, and the median they give."""

import json
import threading

import pytest

from finetune import calibration
from finetune.calibration import Finished, append, expected_seconds, finished, memory_ratio, read

LINE = {
    "run": "a",
    "settings_digest": "s",
    "model": "small",
    "device": "H100",
    "method": "qlora",
    "launch": "ddp",
    "gradient_checkpointing": True,
    "world_size": 2,
    "micro_batch": 4,
    "length": 512,
    "predicted": {"process": 100, "node": 1000},
    "measured": {"process": 110, "node": 900},
    "tokens_per_second": 800.0,
    "training_seconds": 50.0,
    "other_seconds": 30.0,
}
WANTED = {key: LINE[key] for key in calibration.KINDS[0] if key != "on"} | {"on": "gpu"}


def line(**changes):
    return Finished(**LINE | changes)


def measuring(*gpu, **changes):
    """A run for each number: what the GPU held where 100 bytes were predicted."""
    return [line(run=f"{n}", measured={"process": n, "node": 900}, **changes) for n in gpu]


def test_the_median_and_spread_of_runs_of_the_kind():
    found = memory_ratio(measuring(90, 130, 110), WANTED, "process")
    assert (found.median, found.low, found.high, found.runs) == (1.1, 0.9, 1.3, 3)
    assert found.alike == calibration.KINDS[0]


def test_one_odd_run_moves_nothing():
    assert memory_ratio(measuring(108, 110, 112), WANTED, "process").median == 1.1
    assert memory_ratio(measuring(108, 110, 999), WANTED, "process").median == 1.1


def test_of_an_even_number_the_middle_of_the_middle_two():
    assert memory_ratio(measuring(100, 104, 108, 200), WANTED, "process").median == 1.06


def test_node_and_process_are_apart_and_a_cpu_run_says_nothing_of_gpus():
    cpu = [line(device="CPU", measured={"process": None, "node": 500})]
    here = WANTED | {"device": "CPU", "on": "cpu"}
    assert memory_ratio(cpu, here, "process") is None
    assert memory_ratio(cpu, here, "node").median == 0.5
    assert memory_ratio(cpu, WANTED | {"device": None}, "node") is None
    assert memory_ratio(cpu, WANTED, "node") is None


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ({}, 0),
        ({"model": "large"}, 1),
        ({"model": "large", "gradient_checkpointing": False}, 2),
        ({"device": "A100"}, 3),
        ({"method": "lora"}, None),
        ({"launch": "zero2"}, None),
        ({"device": "CPU"}, None),
    ],
)
def test_how_near_a_run_is(other, kind):
    found = memory_ratio([line(**other)], WANTED, "process")
    assert found is None if kind is None else found.alike == calibration.KINDS[kind]


def test_nearer_runs_are_taken_alone():
    near, far = measuring(120), measuring(200, 200, 200, model="large")
    found = memory_ratio([*far, *near], WANTED, "process")
    assert (found.median, found.runs) == (1.2, 1)


def test_with_no_gpu_in_sight_any_will_do():
    lines = [*measuring(125, device="H100"), *measuring(175, device="A100")]
    found = memory_ratio(lines, WANTED | {"device": None}, "process")
    assert (found.median, found.runs) == (1.5, 2)
    assert found.alike == tuple(key for key in calibration.KINDS[0] if key != "device")


def test_no_run_no_ratio():
    assert memory_ratio([], WANTED, "process") is None
    unknown = line(
        predicted={"process": None, "node": None}
    )  # as with other processes than planned
    assert memory_ratio([unknown], WANTED, "process") is None


def test_time_is_tokens_by_the_speed_of_a_process_and_the_rest():
    lines = [
        line(run="a", tokens_per_second=800.0, world_size=2, other_seconds=30.0),  # 400 each
        line(run="b", tokens_per_second=500.0, world_size=1, other_seconds=50.0),
        line(run="c", tokens_per_second=2400.0, world_size=4, other_seconds=40.0),  # 600 each
    ]
    found = expected_seconds(lines, WANTED, tokens=40_000, processes=8)
    expected = {"tokens_per_second": 4000.0, "other_seconds": 40.0, "seconds": 50.0, "runs": 3}
    assert found == expected


def test_the_speed_of_another_model_is_not_taken():
    assert expected_seconds([line(model="large")], WANTED, 1000, 1) is None
    assert expected_seconds([line(device="A100")], WANTED, 1000, 1)["runs"] == 1


RECORD = {
    "run": "a",
    "settings_digest": "s",
    "settings": {"method": "qlora", "launch": "ddp"},
    "model_name": "small",
    "device": "H100",
    "world_size": 2,
    "memory": {
        "process": {"predicted": 100, "corrected": 105, "measured": 110},
        "node": {"predicted": 1000, "corrected": None, "measured": 900},
    },
    "tokens_per_second": 800.0,
    "training_seconds": 50.0,
    "wall_seconds": 80.0,
}
PLAN = {
    "world_size": 2,
    "micro_batch": 4,
    "gradient_checkpointing": True,
    "memory": {"cpu": False},
}


def test_a_line_is_made_of_the_record_and_the_plan():
    """The raw prediction: a corrected one would be corrected again and again."""
    assert finished(RECORD, PLAN, 512).model_dump() == LINE


@pytest.mark.parametrize("other", [{"world_size": 4}, {"memory": {"cpu": True}}])
def test_elsewhere_than_planned_the_prediction_was_not_about_this_run(other):
    """Another number of processes, or CPU processes where there was a GPU."""
    found = finished(RECORD, PLAN | other, 512)
    assert found.predicted == {"process": None, "node": None}
    assert found.measured == {"process": 110, "node": 900}


def test_on_a_cpu_a_prediction_for_a_gpu_was_not_about_this_run():
    on_cpu = finished(RECORD | {"device": "CPU"}, PLAN, 512)
    assert on_cpu.predicted == {"process": None, "node": None}


def test_what_is_appended_is_read(tmp_path):
    path = tmp_path / "calibration.jsonl"
    assert read(path) == ([], 0)
    append(path, line(run="a"))
    append(path, line(run="b"))
    assert read(path) == ([line(run="a"), line(run="b")], 0)


def test_a_run_made_twice_counts_once_as_it_was_last(tmp_path):
    path = tmp_path / "calibration.jsonl"
    for gpu in (110, 150):
        append(path, line(measured={"process": gpu, "node": 900}))
    append(path, line(settings_digest="other"))
    lines, _ = read(path)
    assert [one.measured["process"] for one in lines] == [150, 110]


@pytest.mark.parametrize(
    "damage",
    [
        '{"run": "b", "mod',
        "{}",
        "\x00\x00",
        "[1]",
        json.dumps(LINE | {"tokens_per_second": 0}),
        json.dumps(LINE | {"predicted": {"process": -1}}),
        json.dumps(LINE | {"training_seconds": "NaN"}),
        json.dumps(LINE | {"other_seconds": float("inf")}),
        json.dumps(LINE | {"tokens_per_second": float("inf")}),
    ],
)
def test_damaged_lines_are_counted_and_cost_no_other(tmp_path, damage):
    path = tmp_path / "calibration.jsonl"
    append(path, line(run="a"))
    with open(path, "a") as file:
        file.write(damage)  # and no end of line: a crash
    append(path, line(run="c"))
    lines, damaged = read(path)
    assert [one.run for one in lines] == ["a", "c"]
    assert damaged == 1


def test_a_line_of_newer_code_is_read_as_far_as_it_is_known(tmp_path):
    path = tmp_path / "calibration.jsonl"
    path.write_text(json.dumps(LINE | {"colour": "red"}) + "\n")
    assert read(path) == ([line()], 0)


def test_runs_that_end_at_once_leave_whole_lines(tmp_path):
    path = tmp_path / "calibration.jsonl"
    many = [
        threading.Thread(target=append, args=(path, line(run=f"{n}" * 500))) for n in range(10, 60)
    ]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join()
    lines, damaged = read(path)
    assert (len(lines), damaged) == (50, 0)
