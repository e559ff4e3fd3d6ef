"""What FinetuneTrainer counts beside transformers' own state, kept with each checkpoint.

Without it the first line of metrics.jsonl after a resume would be an average over fewer steps
than in a run that was never stopped, and the tokens before would be forgotten. And under ZeRO-3
sums of the loss would be rounded otherwise (head.agreed).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from finetune import head
from finetune.files import read_json, write_json

if TYPE_CHECKING:
    from finetune.trainer import FinetuneTrainer


def save_counters(trainer: FinetuneTrainer, folder: Path) -> None:
    """One file a rank: since the last logged line, every rank has sums of its own."""
    counters = {
        "loss": trainer._tr_loss.item(),
        "counts": trainer.counts.tolist(),
        "last_logged": trainer._globalstep_last_logged,
        "logged_loss": trainer._total_loss_scalar,
        "total_tokens": trainer.total_tokens,
        "training_seconds": trainer.training_seconds,
        "seconds_since": time.monotonic() - trainer.since,
        "most_pieces": head.most_pieces,
    }
    write_json(folder / f"counters_{trainer.args.process_index}.json", counters)


class RestoreCounters(TrainerCallback):
    """After transformers has set its own to zero, and before the first step."""

    def __init__(self, trainer: FinetuneTrainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer, args = self.trainer, self.trainer.args
        ranks = len(list(self.folder.glob("counters_*.json")))
        saved = [read_json(self.folder / f"counters_{rank}.json") for rank in range(ranks)]
        loss, counts = share_of(saved, args.process_index, args.world_size)
        trainer._tr_loss.fill_(loss)
        trainer.counts.copy_(torch.tensor(counts))
        trainer._globalstep_last_logged = saved[0]["last_logged"]
        trainer._total_loss_scalar = saved[0]["logged_loss"]
        trainer._initial_global_step = 0  # the mean loss is that of the whole run
        trainer.total_tokens = saved[0]["total_tokens"]
        trainer.training_seconds = saved[0]["training_seconds"]
        trainer.since = time.monotonic() - saved[0]["seconds_since"]
        head.most_pieces = saved[0].get("most_pieces", 1)  # older code knew none


def share_of(saved: list[dict], rank: int, world_size: int) -> tuple[float, list[float]]:
    """This rank's own sums. With another number of ranks: the same mean loss, the same total."""
    if len(saved) == world_size:
        return saved[rank]["loss"], saved[rank]["counts"]
    loss = sum(one["loss"] for one in saved) / len(saved)
    totals = [sum(column) for column in zip(*(one["counts"] for one in saved), strict=True)]
    return loss, totals if rank == 0 else [0.0] * len(totals)
