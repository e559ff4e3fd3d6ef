"""What a run says while it trains: metrics.jsonl, and a line now and then."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import median

from transformers import TrainerCallback

from finetune.cli import show
from finetune.metric_lines import read_lines

SECONDS_BETWEEN_LINES = 20
FEWEST, WINDOW = 8, 20
"""Logged losses to know what is usual from, at least and at most."""
DEVIATIONS = 6.0
"""Of a normal distribution, 1 in a billion lies so far out; losses have heavier tails."""
SHARE = 1.3
"""A curve that hardly moves is no reason to call its least move a jump."""


def finite(logs: dict) -> dict:
    """With None for NaN and infinity, which JSON lacks: an fp16 step that overflows has such a
    gradient norm, and is skipped."""
    odd = {name for name, value in logs.items() if isinstance(value, float) and not isfinite(value)}
    return {name: None if name in odd else value for name, value in logs.items()}


def usual_before_jump(losses: Sequence[float], loss: float) -> float | None:
    """The usual loss, if this one is far above it: a learning rate too high, or rows unlike the
    others. By the median and the median deviation, which a jump that is not over hardly moves."""
    if len(losses) < FEWEST:
        return None
    usual = median(losses)
    spread = 1.4826 * median(abs(value - usual) for value in losses)
    return usual if loss > usual + DEVIATIONS * spread and loss > SHARE * usual else None


class Progress(TrainerCallback):
    """Writes every logged step to `path` on rank 0, and some to the terminal.

    That file lies beside the checkpoints until training ends: a run that resumes goes on with it.
    """

    def __init__(self, run: str, path: Path) -> None:
        self.run, self.path, self.first_step = run, path, 0
        losses = (line["loss"] for line in read_lines(path) if "loss" in line)
        self.losses = deque(losses, maxlen=WINDOW)
        self.started = self.said = time.monotonic()

    def on_train_begin(self, args, state, control, **_: object) -> None:
        self.started, self.first_step = time.monotonic(), state.global_step
        done = f", {self.first_step} of them done" if self.first_step else ""
        show(f"{self.run}: {state.max_steps} steps{done}")

    def on_log(self, args, state, control, logs: dict | None = None, **_: object) -> None:
        line = {"step": state.global_step, **finite(logs or {})}
        if "loss" in line:
            line |= self.watch_for_spikes(line)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        last = state.global_step == state.max_steps
        due = time.monotonic() - self.said >= SECONDS_BETWEEN_LINES
        if "loss" in line and (due or last):
            self.said = time.monotonic()
            show(self.line(state, line))
        elif "eval_loss" in line:
            show(f"{self.run}: step {state.global_step}, validation loss {line['eval_loss']:.4f}")

    def watch_for_spikes(self, line: dict) -> dict:
        """A loss that jumps is worth a look, and mostly no reason to stop."""
        usual = usual_before_jump(self.losses, line["loss"])
        self.losses.append(line["loss"])
        if usual is None:
            return {}
        show(
            f"{self.run}: step {line['step']}, the loss jumped to {line['loss']:.4f} from about "
            f"{usual:.4f}; if it stays there, lower optimizer.learning_rate"
        )
        return {"spike": True}

    def line(self, state, log: dict) -> str:
        left = (state.max_steps - state.global_step) * (
            (time.monotonic() - self.started) / (state.global_step - self.first_step)
        )
        return (
            f"{self.run}: step {state.global_step}/{state.max_steps}, loss {log['loss']:.4f}, "
            f"{log['tokens_per_second']:.0f} tokens/s, {left / 60:.1f} min left"
        )
