"""Rows of tokens, padded into batches; packs of rows, kept apart by their positions."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from transformers import BatchEncoding, DataCollatorForSeq2Seq, PreTrainedTokenizerBase

from finetune.encoding import IGNORED

BATCHED = ("input_ids", "labels", "row")
LIMITS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Of samples, as FlashAttention takes them (transformers FlashAttentionKwargs)."""


class RowCollator(DataCollatorForSeq2Seq):
    """Pads by length: the attention mask comes from lengths, labels are padded with IGNORED.

    The name of the base class is the library's; it serves every model whose labels are as long
    as its ids. A batch holds `logits_to_keep`, the positions at which some row is supervised,
    and `shift_labels`, the next tokens there: the head then computes no other logits, which for
    completions saves most of the largest tensor in training. The loss is the same.

    Rows with `lengths` are packs. FlashAttention sees their samples only in a batch of one row:
    for such an `attention` the packs are laid end to end, without padding.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, attention: str | None = None) -> None:
        super().__init__(tokenizer, padding=True)
        self.flat = "flash" in (attention or "")

    def __call__(self, features: list[dict], return_tensors: str | None = None) -> BatchEncoding:
        rows = [{name: feature[name] for name in BATCHED} for feature in features]
        if "lengths" not in features[0]:
            return with_targets(super().__call__(rows, return_tensors))
        lengths = [feature["lengths"] for feature in features]
        if self.flat:
            joined = list(chain(*lengths))
            batch = apart(self.laid_end_to_end(rows), [joined])
            batch.update(limits(joined))
            return with_targets(batch)
        return with_targets(apart(super().__call__(rows, return_tensors), lengths))

    def laid_end_to_end(self, rows: list[dict]) -> BatchEncoding:
        """One row of all packs. `row_of_position` says whose each position is."""
        joined = {name: [t for r in rows for t in r[name]] for name in ("input_ids", "labels")}
        batch = super().__call__([joined])
        batch["row"] = torch.tensor([row["row"] for row in rows])
        sizes = torch.tensor([len(row["input_ids"]) for row in rows])
        batch["row_of_position"] = torch.arange(len(rows)).repeat_interleave(sizes)
        return batch


def apart(batch: BatchEncoding, lengths: list[list[int]]) -> BatchEncoding:
    """Let no sample of a pack see another.

    transformers finds samples by positions that restart, but only without an attention mask
    and without a cache: a mask of ones would let them all see each other, without a word.
    """
    del batch["attention_mask"]
    batch["position_ids"] = restarting_positions(lengths, batch["input_ids"].shape[1])
    batch["use_cache"] = False
    batch["tokens"] = torch.tensor(sum(map(sum, lengths)))
    return batch


def restarting_positions(lengths: list[list[int]], width: int) -> torch.Tensor:
    """(packs, width): each sample counts from 0, and so does the padding after the last. As a
    sample of its own it is seen by none, and has itself to attend to."""
    return torch.stack(
        [
            torch.from_numpy(np.concatenate([np.arange(n) for n in [*pack, width - sum(pack)]]))
            for pack in lengths
        ]
    )


def limits(lengths: list[int]) -> dict[str, torch.Tensor | int]:
    """Where samples that are laid end to end begin and end, and the longest. Without these, each
    layer looks for positions that restart, and waits for the device to have found them."""
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return dict(zip(LIMITS, (ends, ends, max(lengths), max(lengths)), strict=True))


def with_targets(batch: BatchEncoding) -> BatchEncoding:
    following = batch["labels"][:, 1:]
    kept = (following != IGNORED).any(dim=0).nonzero().squeeze(1)
    batch["logits_to_keep"], batch["shift_labels"] = kept, following[:, kept].contiguous()
    return batch
