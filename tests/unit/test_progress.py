"""metrics.jsonl, and what the person at the terminal reads meanwhile."""

import json
import math
from types import SimpleNamespace

import pytest

from finetune import progress
from finetune.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def report(tmp_path, clock, capsys):
    """report(step, **logs): what is said about a logged step of 40."""
    callback = Progress("tiny", tmp_path / "metrics.jsonl")
    callback.on_train_begin(None, SimpleNamespace(max_steps=40, global_step=0), None)
    assert capsys.readouterr().err == "tiny: 40 steps\n"

    def report(step, **logs):
        state = SimpleNamespace(global_step=step, max_steps=40)
        callback.on_log(None, state, None, logs=logs)
        return capsys.readouterr().err

    return report


def lines(tmp_path, name="metrics.jsonl"):
    def refuse(constant):
        raise ValueError(constant)

    text = (tmp_path / name).read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_every_logged_step_is_a_line_of_the_file(report, tmp_path):
    report(1, loss=2.5, tokens=10, tokens_per_second=5.0)
    report(2, eval_loss=2.25)
    report(2, train_loss=2.4)
    assert lines(tmp_path) == [
        {"step": 1, "loss": 2.5, "tokens": 10, "tokens_per_second": 5.0},
        {"step": 2, "eval_loss": 2.25},
        {"step": 2, "train_loss": 2.4},
    ]


def test_a_run_that_goes_on_goes_on_with_its_file_and_its_clock(report, clock, tmp_path, capsys):
    report(10, loss=2.5, tokens_per_second=5.0)
    again = Progress("tiny", tmp_path / "metrics.jsonl")
    again.on_train_begin(None, SimpleNamespace(max_steps=40, global_step=10), None)
    assert capsys.readouterr().err == "tiny: 40 steps, 10 of them done\n"
    clock.now += 20
    state = SimpleNamespace(max_steps=40, global_step=20)
    again.on_log(None, state, None, logs={"loss": 2.0, "tokens_per_second": 5.0})
    # these 10 steps took 20 s
    assert capsys.readouterr().err.endswith(" 0.7 min left\n")
    assert [line["step"] for line in lines(tmp_path)] == [10, 20]


def test_a_loss_that_jumps_is_flagged_and_said_and_training_goes_on(report, tmp_path):
    for step in range(1, 11):
        assert report(step, loss=2.0 - step / 100, tokens_per_second=5.0) == ""
    said = report(11, loss=6.0, tokens_per_second=5.0)
    assert said.startswith("tiny: step 11, the loss jumped to 6.0000 from about 1.9450;")
    assert report(12, loss=1.9, tokens_per_second=5.0) == ""
    assert [line["step"] for line in lines(tmp_path) if line.get("spike")] == [11]


def test_the_terminal_hears_of_it_every_20_seconds_with_the_time_left(report, clock):
    clock.now += 19.9
    assert report(8, loss=2.5, tokens_per_second=99.6) == ""
    clock.now += 0.1
    # 10 steps took 20 s, so 30 steps take a minute
    assert report(10, loss=2.5, tokens_per_second=99.6) == (
        "tiny: step 10/40, loss 2.5000, 100 tokens/s, 1.0 min left\n"
    )
    clock.now += 19.9
    assert report(11, loss=2.5, tokens_per_second=99.6) == ""


def test_the_last_step_and_validations_are_always_said(report, clock):
    clock.now += 1
    assert report(20, eval_loss=1.23456) == "tiny: step 20, validation loss 1.2346\n"
    assert report(40, loss=2.5, tokens_per_second=7.0) == (
        "tiny: step 40/40, loss 2.5000, 7 tokens/s, 0.0 min left\n"
    )
    assert report(40, train_loss=2.5) == ""


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_overflow_of_fp16_is_no_failure(report, tmp_path, value):
    """The gradient norm of a step that the loss scaler skips; JSON has no such number."""
    report(1, loss=2.5, grad_norm=value, tokens_per_second=5.0)
    assert lines(tmp_path)[0]["grad_norm"] is None
    assert lines(tmp_path)[0]["loss"] == 2.5
