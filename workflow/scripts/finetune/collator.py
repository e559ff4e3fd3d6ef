"""Rows of tokens, padded into batches."""

from __future__ import annotations

from transformers import BatchEncoding, DataCollatorForSeq2Seq, PreTrainedTokenizerBase

from finetune.encoding import IGNORED

BATCHED = ("input_ids", "labels", "row")


class RowCollator(DataCollatorForSeq2Seq):
    """Pads by length: the attention mask comes from lengths, labels are padded with IGNORED.

    The name of the base class is the library's; it serves every model whose labels are as long
    as its ids. A batch holds `logits_to_keep`, the positions at which some row is supervised,
    and `shift_labels`, the next tokens there: the head then computes no other logits, which for
    completions saves most of the largest tensor in training. The loss is the same.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, padding=True)

    def __call__(self, features: list[dict], return_tensors: str | None = None) -> BatchEncoding:
        rows = [{name: feature[name] for name in BATCHED} for feature in features]
        batch = super().__call__(rows, return_tensors)
        following = batch["labels"][:, 1:]
        kept = (following != IGNORED).any(dim=0).nonzero().squeeze(1)
        return BatchEncoding(
            {**batch, "logits_to_keep": kept, "shift_labels": following[:, kept].contiguous()}
        )
