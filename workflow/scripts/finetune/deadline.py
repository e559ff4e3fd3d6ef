"""When the job's time ends, and how early training has to stop to have saved by then.

Nothing here waits for a signal: schedulers send it late, to some processes only, or not at all.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from statistics import median

import psutil

from finetune.cli import UserError, say
from finetune.files import read_json, write_json

END_TIME = "FINETUNE_END_TIME"
"""Environment variable: seconds since 1970 at which the job is ended by force. The launcher sets
it for the ranks; outside SLURM whoever starts the job may."""
PACE = "pace.json"
"""Beside the checkpoints: seconds that a start, a step and a save took."""
RECENT = 50
"""Steps whose median counts: one that a file system held up says nothing of the next."""
SAFETY = 2.0
"""How many times longer than measured a step or a save may take: file systems are shared."""
SECONDS_TO_LEAVE = 15.0
"""From the last file written to the end of the job: all ranks, the launcher, Snakemake."""


def end_of_job() -> float | None:
    """Seconds since 1970; None where no end is known."""
    if text := os.environ.get(END_TIME):
        try:
            return float(text)
        except ValueError:
            raise UserError(f"{END_TIME} is {text!r}: give seconds, as `date +%s` does") from None
    job = os.environ.get("SLURM_JOB_ID")
    return slurm_end(job) if job else None


def slurm_end(job: str) -> float | None:
    """What SLURM says now: an administrator may have moved the end."""
    command = ["squeue", "--noheader", "--job", job, "--format", "%e"]
    env = os.environ | {"SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        return datetime.fromisoformat(done.stdout.strip()).timestamp()
    except (OSError, subprocess.TimeoutExpired, ValueError):  # no squeue, no answer, no limit
        if text := os.environ.get("SLURM_JOB_END_TIME"):
            return float(text)
    say(
        f"SLURM names no end of job {job}. If it has a time limit, up to "
        "checkpoint_minutes of training will be lost there"
    )
    return None


def check_time(end: float | None, state: Path) -> None:
    """Refuse to start what could not save a single step. Nothing is known of a run at first."""
    pace = read_pace(state)
    start, step, save = (pace.get(name, 0.0) for name in ("start", "step", "save"))
    needed, left = start + margin(pace), (end or 0) - time.time()
    if end is not None and left < needed:
        raise UserError(
            f"this job ends in {left:.0f} s, and to train and save one step may take "
            f"{needed:.0f} s (start {start:.0f}, {SAFETY:g} times step {step:.0f} and save "
            f"{save:.0f}, leave {SECONDS_TO_LEAVE:.0f}). Nothing was started. "
            "Give `train` more time: `runtime` under `set-resources` in the profile, in minutes."
        )


def margin(pace: dict[str, float]) -> float:
    """Seconds in which another step, and a save after it, surely end."""
    return SAFETY * (pace.get("step", 0.0) + pace.get("save", 0.0)) + SECONDS_TO_LEAVE


def read_pace(state: Path) -> dict[str, float]:
    return read_json(state / PACE) if (state / PACE).exists() else {}


class Deadline:
    """The end of the job as one rank sees it, and what it has measured: the last start, the usual
    step, and the longest save, since there are few, and one too late costs what it would save."""

    def __init__(self, state: Path) -> None:
        text = os.environ.get(END_TIME)
        self.end = float(text) if text else None
        self.file, self.pace = state / PACE, read_pace(state)
        self.steps: deque[float] = deque(maxlen=RECENT)

    def started(self) -> None:
        """All is loaded: the first step comes now."""
        self.pace["start"] = round(time.time() - psutil.Process().create_time(), 2)

    def stepped(self, seconds: float) -> None:
        self.steps.append(seconds)
        self.pace["step"] = round(median(self.steps), 2)

    def saved(self, seconds: float) -> None:
        self.pace["save"] = round(max(seconds, self.pace.get("save", 0.0)), 2)

    def write(self) -> None:
        """For the launcher that goes on. One rank does."""
        write_json(self.file, self.pace)

    def unmeasured(self) -> bool:
        """Whether a save is due for no other reason than to know how long one takes."""
        return self.end is not None and "save" not in self.pace

    def near(self) -> bool:
        """Whether another step, and a save after it, might not end in time."""
        return self.end is not None and time.time() + margin(self.pace) >= self.end
