"""What the tokens of a split are like: counted where rows are tokenized, and added up."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.encoding import IGNORED, Example, TextEncoder

SAMPLES = {"train": 5, "validation": 2, "test": 2}
SAMPLE_TOKENS = 2_000
BINS = 20


@dataclass
class Counts:
    """Counts of some rows. Those of several parts add up."""

    what: Counter[str] = field(default_factory=Counter)
    lengths: array[int] = field(default_factory=lambda: array("i"))
    """Tokens of each example that is kept."""
    uncut: array[int] = field(default_factory=lambda: array("i"))
    """Tokens of all examples, before any is cut or dropped."""
    labels: Counter[str] = field(default_factory=Counter)
    most_supervised: int = 0
    """Supervised tokens of one example, at most: where logits are computed."""

    def add(self, other: Counts) -> None:
        self.what += other.what
        self.lengths += other.lengths
        self.uncut += other.uncut
        self.labels += other.labels
        self.most_supervised = max(self.most_supervised, other.most_supervised)

    def example(self, example: Example, encoder: TextEncoder, ends: bool) -> None:
        """Count an example that is kept. `ends`: it was not cut at its end."""
        labels = example.labels
        self.ids(example.input_ids, encoder)
        supervised = len(labels) - labels.count(IGNORED)
        self.what["supervised_tokens"] += supervised
        self.most_supervised = max(self.most_supervised, supervised)
        if ends:
            last = next((label for label in reversed(labels) if label != IGNORED), None)
            self.what["endings"] += 1
            self.what["ended"] += last in encoder.ends

    def ids(self, ids: list[int], encoder: TextEncoder) -> None:
        self.lengths.append(len(ids))
        self.what["with_bos"] += ids[0] == encoder.bos
        self.what["eos_tokens"] += ids.count(encoder.eos)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """The special tokens, which a tokenizer reads as such in anybody's text too."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def holds_control_token(row: dict, pattern: re.Pattern[str]) -> bool:
    """Whether the text of a prepared row holds one."""
    texts = [turn["content"] for turn in row["messages"] or ()] or [row["text"]]
    return any(pattern.search(text) for text in texts)


def describe(counts: Counts) -> dict[str, Any]:
    """The section of lint.json on one split."""
    lengths, what = np.array(counts.lengths, dtype=np.int64), counts.what
    names = ("supervised_tokens", "truncated", "rewritten", "empty_thoughts", "control_tokens")
    more = ("with_bos", "eos_tokens", "endings", "ended")
    return {
        "rows": what["rows"],
        "examples": len(lengths),
        "sequences": len(lengths),
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max(initial=0)),
        "most_supervised": counts.most_supervised,
        "dropped": {cause: what[cause] for cause in ("too_long", "unsupervised")},
        **{name: what[name] for name in (*names, *more)},
        **spread(np.array(counts.uncut, dtype=np.int64)),
    }


def spread(lengths: np.ndarray) -> dict[str, Any]:
    """Quantiles and histogram of lengths in tokens, from which max_length is chosen."""
    if len(lengths) == 0:
        return {
            "quantiles": {"p50": 0, "p90": 0, "p99": 0},
            "histogram": {"edges": [], "counts": []},
        }
    values = np.quantile(lengths, [0.5, 0.9, 0.99], method="higher").tolist()
    top = max(1, int(lengths.max()))
    edges = np.unique(np.linspace(0, top, min(BINS, top) + 1).round().astype(int))
    heights, _ = np.histogram(lengths, edges)
    return {
        "quantiles": dict(zip(("p50", "p90", "p99"), values, strict=True)),
        "histogram": {"edges": edges.tolist(), "counts": heights.tolist()},
    }


def sample_rows(lengths: Sequence[int], count: int) -> list[int]:
    """Indices of examples of all lengths: the shortest, the longest, and some between."""
    order = np.argsort(lengths, kind="stable")
    places = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)
    return order[places].tolist() if len(order) else []


def sample(
    row: dict, tokenizer: PreTrainedTokenizerBase, classes: list[str] | None
) -> dict[str, Any]:
    """One example decoded, in runs of what is trained on and what is not, or with its class."""
    ids, labels = row["input_ids"][:SAMPLE_TOKENS], row["labels"]
    if classes:
        return {
            "id": row["id"],
            "label": classes[labels],
            "pieces": [[False, tokenizer.decode(ids)]],
        }
    runs = [
        (learned, [token for token, _ in run])
        for learned, run in groupby(zip(ids, labels, strict=False), lambda pair: pair[1] != IGNORED)
    ]
    return {"id": row["id"], "pieces": [[learned, tokenizer.decode(run)] for learned, run in runs]}
