"""A rank that hangs ends the run, after every rank has shown where it stands."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import psutil
from transformers import TrainerCallback

from finetune.faults import Place
from finetune.outcome import claim, read_outcome
from finetune.processes import PARENT, STACKS, several_nodes

SECONDS_TO_PRINT = 0.5
SECONDS_FOR_OTHER_NODES = 5
"""In which their watchdogs fire too, and show where their ranks stand."""


class Watchdog(TrainerCallback):
    """Fires when this rank does nothing for too long: no micro-batch, validation batch, or save.

    Each rank has one, since a rank that hangs may keep its own threads from running.
    """

    def __init__(self, folder: Path, minutes: float, rank: int, place: Place) -> None:
        self.folder, self.seconds, self.rank, self.place = folder, minutes * 60, rank, place
        self.beat()
        threading.Thread(target=self.watch, daemon=True).start()

    def beat(self, *_: object, **__: object) -> None:
        self.last = time.monotonic()

    on_train_begin = on_substep_end = on_prediction_step = on_save = on_train_end = beat

    def on_step_end(self, args: object, state: object, *_: object, **__: object) -> None:
        self.place.step = state.global_step
        self.beat()

    def watch(self) -> None:
        while (left := self.last + self.seconds - time.monotonic()) > 0:
            time.sleep(left)
        node = os.environ.get("GROUP_RANK")  # torchrun's number for it
        first = claim(self.folder, "hang", rank=self.rank, step=self.place.step, node=node)
        if first or speaks_for(node, self.folder):
            for process in ranks():
                show_stacks(process)
        if not first:  # when that one ends, all do
            time.sleep(self.seconds)
        elif several_nodes():
            time.sleep(SECONDS_FOR_OTHER_NODES)
        os._exit(1)


def speaks_for(node: str | None, folder: Path) -> bool:
    """Whether this rank has to show those of its node, for the first to tell is on another."""
    first = read_outcome(folder).get("node")
    return first != node and os.environ.get("LOCAL_RANK") == "0"


def show_stacks(process: psutil.Process) -> None:
    rank = process.environ().get("RANK", "0")
    print(f"\nwatchdog: where rank {rank} (process {process.pid}) stands", file=sys.stderr)
    process.send_signal(STACKS)
    time.sleep(SECONDS_TO_PRINT)


def ranks() -> list[psutil.Process]:
    """All ranks, this one included: the children of the agent, where there is one."""
    return psutil.Process(os.getppid()).children() if PARENT in os.environ else [psutil.Process()]
