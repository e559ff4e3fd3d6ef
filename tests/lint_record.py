"""A `lint.json` as tokenize_data writes it, for tests of what reads it."""

from __future__ import annotations

from finetune.config import merge

SPLIT = {
    "rows": 1000,
    "examples": 1000,
    "sequences": 1000,
    "tokens": 100_000,
    "supervised_tokens": 40_000,
    "longest": 480,
    "most_supervised": 200,
    "quantiles": {"p50": 90, "p90": 200, "p99": 400},
    "histogram": {"edges": [0, 100, 200, 300, 400, 500], "counts": [600, 300, 0, 75, 25]},
    "dropped": {"too_long": 0, "unsupervised": 0},
    "truncated": 0,
    "rewritten": 0,
    "empty_thoughts": 0,
    "control_tokens": 0,
    "with_bos": 0,
    "eos_tokens": 2000,
    "endings": 1000,
    "ended": 1000,
    "samples": [{"id": "a.jsonl:1", "pieces": [[False, "user: hi\n"], [True, "hello</s>"]]}],
}
EMPTY = dict.fromkeys(SPLIT, 0) | {
    "quantiles": {"p50": 0, "p90": 0, "p99": 0},
    "histogram": {"edges": [], "counts": []},
    "dropped": {"too_long": 0, "unsupervised": 0},
    "samples": [],
}
WHOLE = {
    "task": "causal-lm",
    "labels": None,
    "label_counts": None,
    "packing": {
        "asked": False,
        "used": False,
        "why_not": None,
        "padding_before": 0.25,
        "padding_after": 0.25,
        "efficiency": None,
    },
    "prepared": {
        "rows": {"train": 1000, "validation": 100, "test": 200},
        "duplicates": 0,
        "rejected": {},
        "overlap": 0,
    },
    "settings": {
        "system_prompt": None,
        "train_on": "completions",
        "max_length": 512,
        "truncate": "drop",
        "packing": False,
        "trust_remote_code": False,
        "template_options": {},
    },
    "train": SPLIT,
    "validation": SPLIT | {"rows": 100},
    "test": SPLIT | {"rows": 200},
}
LABELLED = merge(
    WHOLE,
    {
        "task": "sequence-classification",
        "labels": ["sport", "news"],
        "label_counts": [250, 750],
        "train": {
            "supervised_tokens": 0,
            "endings": 0,
            "ended": 0,
            "samples": [{"id": "b.csv:1", "label": "sport", "pieces": [[False, "a match"]]}],
        },
    },
)


def lint(base: dict = WHOLE, **changes) -> dict:
    """`base` with changes, deep down."""
    return merge(base, changes)
