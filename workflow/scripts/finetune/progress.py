"""What a run says while it trains: metrics.jsonl, and a line now and then."""

from __future__ import annotations

import json
import os
import time
from math import isfinite
from pathlib import Path

from transformers import TrainerCallback

from finetune.cli import say

SECONDS_BETWEEN_LINES = 20


def finite(logs: dict) -> dict:
    """With None for NaN and infinity, which JSON lacks: an fp16 step that overflows has such a
    gradient norm, and is skipped."""
    odd = {name for name, value in logs.items() if isinstance(value, float) and not isfinite(value)}
    return {name: None if name in odd else value for name, value in logs.items()}


class Progress(TrainerCallback):
    """Writes every logged step to metrics.jsonl on rank 0, and some to the terminal.

    The file lies aside until training ends: Snakemake takes a file that is there for a finished
    one, and after a stop it would ask what to do with it.
    """

    def __init__(self, run: str, path: Path) -> None:
        self.run = run
        self.path = path
        self.aside = path.with_name(f".{path.name}.partial")
        self.aside.write_text("")
        self.started = self.said = time.monotonic()

    def on_train_begin(self, args, state, control, **_: object) -> None:
        self.started = time.monotonic()
        say(f"{self.run}: {state.max_steps} steps")

    def on_log(self, args, state, control, logs: dict | None = None, **_: object) -> None:
        line = {"step": state.global_step, **finite(logs or {})}
        with open(self.aside, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        last = state.global_step == state.max_steps
        due = time.monotonic() - self.said >= SECONDS_BETWEEN_LINES
        if "loss" in line and (due or last):
            self.said = time.monotonic()
            say(self.line(state, line))
        elif "eval_loss" in line:
            say(f"{self.run}: step {state.global_step}, validation loss {line['eval_loss']:.4f}")

    def on_train_end(self, *_: object, **__: object) -> None:
        os.replace(self.aside, self.path)

    def line(self, state, log: dict) -> str:
        left = (state.max_steps - state.global_step) * (
            (time.monotonic() - self.started) / state.global_step
        )
        return (
            f"{self.run}: step {state.global_step}/{state.max_steps}, loss {log['loss']:.4f}, "
            f"{log['tokens_per_second']:.0f} tokens/s, {left / 60:.1f} min left"
        )
