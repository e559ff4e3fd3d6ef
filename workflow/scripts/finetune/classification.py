"""Rows with one class each: their batches, loss, scores, predictions and trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import BatchEncoding, DataCollatorWithPadding

from finetune.collator import BATCHED
from finetune.halving import in_halves
from finetune.sampling import by_length
from finetune.trainer import FinetuneTrainer


class LabelCollator(DataCollatorWithPadding):
    """Pads ids by length; `labels` holds the class of each row."""

    def __call__(self, features: list[dict]) -> BatchEncoding:
        return super().__call__([{name: row[name] for name in BATCHED} for row in features])


def class_scores(model: torch.nn.Module, batch: Mapping) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: negative log-likelihood (nats), 1, and whether the class is right; and the logits.

    The columns are those of scores.row_scores, with rows in place of tokens.
    """
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    wanted, logits = batch["labels"], logits.float()
    nll = F.cross_entropy(logits, wanted, reduction="none")
    right = (logits.argmax(-1) == wanted).float()
    return torch.stack([nll, torch.ones_like(nll), right], dim=1), logits


def mean_over_rows(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """The loss, averaged over the rows of all ranks and accumulation steps.

    The models' own averages over a micro-batch, whatever count the Trainer hands them: with
    accumulation it would come out that many times too large.
    """
    total = F.cross_entropy(outputs.logits.float(), labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def class_prior(counts: list[int]) -> np.ndarray:
    """Log-probability of each class from the training rows alone. Every class counts once more,
    so that none is impossible."""
    smoothed = np.asarray(counts) + 1
    return np.log(smoothed / smoothed.sum())


@torch.inference_mode()
def predict(model: torch.nn.Module, tokenizer, rows: Dataset, batch_size: int) -> np.ndarray:
    """Log-probabilities (rows, classes), in the order of the rows."""
    tokenizer.padding_side = "right"
    collate, found = LabelCollator(tokenizer), {}

    def logits(chosen: list[int]) -> np.ndarray:
        batch = collate([rows[i] for i in chosen]).to(model.device)
        return class_scores(model, batch)[1].double().log_softmax(-1).cpu().numpy()

    for batch in by_length(rows["length"][:], batch_size):
        for chosen, nats in in_halves(logits, batch):
            found |= zip(chosen, nats, strict=True)
    return np.stack([found[index] for index in range(len(rows))])


def class_lines(data: Path, ids: list[str], labels: list[str], nats: np.ndarray) -> list[dict]:
    """Each test row with its most likely class, from log-probabilities, and how likely that is."""
    rows = {row["id"]: row for row in pq.read_table(data).to_pylist()}
    return [
        {
            "id": name,
            "text": rows[name]["text"],
            "reference": rows[name]["label"],
            "prediction": labels[chances.argmax()],
            "probability": float(np.exp(chances.max())),
        }
        for name, chances in zip(ids, nats, strict=True)
    ]


class ClassificationTrainer(FinetuneTrainer):
    """FinetuneTrainer for rows of LabelCollator."""

    accuracy = "accuracy"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, compute_loss_func=mean_over_rows, **kwargs)
        self.model_accepts_loss_kwargs = False  # the loss above takes the count, no model does
        self._loss_shifts_labels = False

    @staticmethod
    def row_scores(model: torch.nn.Module, batch: Mapping) -> torch.Tensor:
        return class_scores(model, batch)[0]

    def supervised(self, inputs: Mapping) -> int:
        """No token is: the row is."""
        return 0
