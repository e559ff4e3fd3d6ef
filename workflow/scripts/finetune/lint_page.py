"""The readable page of the data check: what `lint.html.j2` shows of `lint.json`."""

from __future__ import annotations

import json
from itertools import count

from finetune.checks import CAUSAL, notices
from finetune.pages import render
from finetune.splits import SPLITS

FAR = 1.5
"""A limit further out than this, as a share of the longest, would squeeze the bars."""


def lint_page(title: str, lint: dict, failed: list[str]) -> str:
    """`failed` is what checks.failed_checks says."""
    classes = zip(lint["labels"] or [], lint["label_counts"] or [], strict=True)
    return render(
        "lint.html.j2",
        title=f"Data check: {title}",
        lint=lint,
        failed=failed,
        notices=notices(lint),
        splits=SPLITS,
        causal=lint["task"] == CAUSAL,
        made_with=made_with(lint["settings"]),
        classes=sorted(classes, key=lambda pair: -pair[1]),
        **histogram(**lint["train"]["histogram"], max_length=lint["settings"]["max_length"]),
    )


def made_with(settings: dict) -> str:
    """The settings that say something, as a sentence."""
    said = (
        f"{key}: {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
        if value not in (None, {})
    )
    return f"Made with {', '.join(said)}."


def histogram(edges: list[int], counts: list[int], max_length: int) -> dict:
    """Bars over a linear axis of tokens that starts at 0; no bar for an empty bin."""
    bins = [bar for bar in zip(edges, edges[1:], counts, strict=False) if bar[2]]
    longest = max([1, *edges])
    near = longest < max_length <= FAR * longest
    return {
        "bins": bins,
        "right": max_length if near else longest,
        "most": max(counts, default=0),
        "max_length": max_length,
        "ticks": ticks,
    }


def ticks(top: int) -> range:
    """From 0, in at most five steps of 1, 2 or 5 times a power of ten."""
    steps = (times * 10**power for power in count() for times in (1, 2, 5))
    return range(0, top + 1, next(step for step in steps if 5 * step >= top))
