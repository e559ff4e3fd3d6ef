"""Loss and accuracy per row: summed over rows they are exact for any batch or world size."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from finetune.collator import LIMITS
from finetune.cross_entropy import TokenLosses
from finetune.encoding import IGNORED
from finetune.head import held, pieces


def row_scores(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Per row: summed negative log-likelihood (nats), supervised tokens, tokens predicted right.

    `logits` is (rows, positions, vocabulary); `targets` (rows, positions) holds the token that
    follows each position, or IGNORED. Returns (rows, 3) in float32.
    """
    mask = targets != IGNORED
    kept, wanted = logits[mask], targets[mask]
    values = torch.stack(
        [
            TokenLosses.apply(kept, wanted),
            torch.ones_like(wanted, dtype=torch.float32),
            (kept.argmax(-1) == wanted).float(),
        ],
        dim=1,
    )
    totals = torch.zeros(targets.shape[0], 3, device=logits.device)
    return totals.index_add_(0, mask.nonzero()[:, 0], values)


INPUTS = ("input_ids", "attention_mask", "position_ids", *LIMITS, "use_cache", "logits_to_keep")


def batch_scores(model: torch.nn.Module, batch: Mapping) -> tuple[torch.Tensor, torch.Tensor]:
    """Row scores of a RowCollator batch, and the logits they come from."""
    logits = model(**{name: batch[name] for name in INPUTS if name in batch}).logits
    targets = batch["shift_labels"]
    if "row_of_position" in batch:  # packs laid end to end: back to one row each
        owners = batch["row_of_position"][batch["logits_to_keep"]]
        rows = torch.arange(len(batch["row"]), device=owners.device)
        targets = torch.where(owners == rows[:, None], targets, IGNORED)
        return row_scores(logits.expand(len(rows), -1, -1), targets), logits
    return row_scores(logits, targets), logits


def scores_in_pieces(model: torch.nn.Module, batch: Mapping) -> torch.Tensor:
    """Row scores of a RowCollator batch, with no more logits at once than a piece has."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    with held(causal):
        return sum(batch_scores(model, {**batch, **piece})[0] for piece in pieces(causal, batch))
