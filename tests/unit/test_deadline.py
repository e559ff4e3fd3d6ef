"""When a job's time ends, and how early training stops."""

import json
import os
import time

import pytest

from finetune import deadline
from finetune.cli import UserError
from finetune.deadline import END_TIME, SECONDS_TO_LEAVE, Deadline, check_time, end_of_job

ANSWERS = """#!/bin/sh
[ "$*" = "--noheader --job 7 --format %e" ] || exit 1
[ "$SLURM_TIME_FORMAT" = standard ] || exit 1
echo "{}"
"""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in (END_TIME, "SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """squeue(answer): put a program on the path that gives it, and be SLURM's job 7."""

    def put(answer):
        (tmp_path / "squeue").write_text(ANSWERS.format(answer))
        (tmp_path / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "7")

    return put


def test_outside_a_scheduler_there_is_no_end():
    assert end_of_job() is None


def test_an_end_that_is_given_goes_before_slurms(squeue, monkeypatch):
    squeue("2026-01-02T03:04:05")
    monkeypatch.setenv(END_TIME, "1234.5")
    assert end_of_job() == 1234.5
    monkeypatch.setenv(END_TIME, "tomorrow")
    with pytest.raises(UserError, match="is 'tomorrow': give seconds"):
        end_of_job()


def test_slurm_is_asked_in_its_own_time_zone(squeue, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        squeue("1970-01-02T09:00:10")
        assert end_of_job() == 24 * 3600 + 10
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("answer", ["N/A", "Unknown", ""])
def test_a_job_without_a_limit_has_no_end_and_that_is_said(squeue, monkeypatch, answer, capsys):
    squeue(answer)
    assert end_of_job() is None
    assert "SLURM names no end of job 7" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_END_TIME", "99")
    assert end_of_job() == 99


def test_a_node_without_squeue_has_what_slurm_set(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "99")
    assert end_of_job() == 99


def test_too_little_time_for_one_step_is_refused_with_its_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(deadline.time, "time", lambda: 1000.0)
    check_time(1000 + SECONDS_TO_LEAVE, tmp_path)  # nothing is known of this run yet
    (tmp_path / "pace.json").write_text(json.dumps({"start": 60.2, "step": 5.0, "save": 20.0}))
    check_time(None, tmp_path)
    check_time(1126, tmp_path)
    with pytest.raises(UserError) as error:
        check_time(1125, tmp_path)
    assert str(error.value).startswith(
        "this job ends in 125 s, and to train and save one step may take 125 s "
        "(start 60, 2 times step 5 and save 20, leave 15). Nothing was started."
    )


def test_a_job_that_may_start_has_time_for_a_step_once_it_has_started(tmp_path, monkeypatch):
    """Else it would load the model, stop before its first step, and be submitted again."""
    pace = {"start": 60.0, "step": 5.0, "save": 20.0}
    (tmp_path / "pace.json").write_text(json.dumps(pace))
    monkeypatch.setattr(deadline.time, "time", lambda: 1000.0)
    shortest = next(end for end in range(1000, 2000) if allowed(end, tmp_path))
    monkeypatch.setattr(deadline.time, "time", lambda: 1059.9)
    monkeypatch.setenv(END_TIME, str(shortest))
    assert not Deadline(tmp_path).near()


def allowed(end, folder):
    try:
        check_time(end, folder)
    except UserError:
        return False
    return True


def test_it_is_near_when_another_step_and_a_save_might_take_too_long(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(deadline.time, "time", lambda: now)
    monkeypatch.setenv(END_TIME, "2000")
    clock = Deadline(tmp_path)
    assert clock.unmeasured()
    for seconds in (5.0, 600.0, 10.0):  # one was held up
        clock.stepped(seconds)
    for seconds in (30.0, 20.0):
        clock.saved(seconds)
    assert not clock.unmeasured()
    now = 2000 - 2 * (10 + 30) - SECONDS_TO_LEAVE - 0.1
    assert not clock.near()
    now += 0.1
    assert clock.near()
    clock.write()
    assert Deadline(tmp_path).pace == {"step": 10.0, "save": 30.0}  # what goes on knows it


def test_without_an_end_it_is_never_near_and_saves_nothing_early(tmp_path):
    clock = Deadline(tmp_path)
    assert not clock.near()
    assert not clock.unmeasured()
