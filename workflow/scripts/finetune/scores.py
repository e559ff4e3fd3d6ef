"""Loss and accuracy per row: summed over rows they are exact for any batch or world size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from finetune.encoding import IGNORED


def row_scores(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Per row: summed negative log-likelihood (nats), supervised tokens, tokens predicted right.

    `logits` is (rows, positions, vocabulary); `targets` (rows, positions) holds the token that
    follows each position, or IGNORED. Returns (rows, 3) in float32.
    """
    mask = targets != IGNORED
    kept, wanted = logits[mask].float(), targets[mask]
    values = torch.stack(
        [
            F.cross_entropy(kept, wanted, reduction="none"),
            torch.ones_like(wanted, dtype=torch.float32),
            (kept.argmax(-1) == wanted).float(),
        ],
        dim=1,
    )
    totals = torch.zeros(targets.shape[0], 3, device=logits.device)
    return totals.index_add_(0, mask.nonzero()[:, 0], values)


INPUTS = ("input_ids", "attention_mask", "logits_to_keep")


def batch_scores(model: torch.nn.Module, batch: Mapping) -> tuple[torch.Tensor, torch.Tensor]:
    """Row scores of a RowCollator batch, and the logits they come from."""
    logits = model(**{name: batch[name] for name in INPUTS}).logits
    return row_scores(logits, batch["shift_labels"]), logits
