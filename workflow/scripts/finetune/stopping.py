"""When to save and when to stop, decided by all ranks together at the end of a step.

A rank that acted on its own flag would save at another step than the others, and all would wait
for each other for ever.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from finetune.deadline import Deadline
from finetune.outcome import STOP


class Stopper(TrainerCallback):
    """Saves when the time for it has come, and stops when the file is there or the job's time is
    nearly over."""

    def __init__(self, folder: Path, minutes: float, device: torch.device) -> None:
        self.file, self.seconds, self.device = folder / STOP, minutes * 60, device
        self.deadline = Deadline(folder)
        self.saved = self.began = time.monotonic()
        self.stopped, self.late = False, 0

    def agree(self, due: bool = False) -> list[int]:
        """Whether some rank wants to stop, and whether one wants to save."""
        wishes = [self.file.exists(), self.deadline.near(), due]
        wishes = torch.tensor(wishes, dtype=torch.int32, device=self.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(wishes, torch.distributed.ReduceOp.MAX)
        asked, self.late, due = wishes.tolist()
        return [asked or self.late, due]

    def stop(self, control: Any) -> None:
        """Save and leave. A validation that is due is made up for after the resume."""
        self.stopped = True
        control.should_save = control.should_training_stop = True
        control.should_evaluate = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self.saved = time.monotonic()
        self.deadline.started()
        if self.agree()[0]:  # before a step: there is nothing new to save
            self.stopped = control.should_training_stop = True

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        now = time.monotonic()
        self.deadline.stepped(now - self.began)
        stop, due = self.agree(now - self.saved >= self.seconds or self.deadline.unmeasured())
        if stop:
            self.stop(control)
        elif due and state.global_step < state.max_steps:
            control.should_save = True

    def on_save(self, args: Any, state: Any, *_: object, **__: object) -> None:
        self.saved = time.monotonic()
        if state.is_world_process_zero:
            self.deadline.write()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if self.stopped:
            control.should_evaluate = False
