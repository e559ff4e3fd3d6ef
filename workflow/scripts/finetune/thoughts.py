"""What reasoning models think before they answer: `<think>…</think>` in their text."""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
EMPTY_THOUGHT = re.compile(rf"({OPEN}\s*{CLOSE}\n*)")
"""What some templates write before an answer without a thought: in the prompt where they are told
that there is none to come (`enable_thinking: false`), else in the answer."""
KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names of a turn's reasoning; transformers hands it to a template by those that templates read."""


def is_skipped(prompt: str) -> bool:
    """Whether a prompt holds the thought already, so that the answer itself follows."""
    return prompt.rstrip().endswith(CLOSE)


def reasoning(message: dict) -> str:
    """The reasoning of a turn that holds it apart from its content."""
    return str(next((message[key] for key in KEYS if message.get(key)), "")).strip()


def said(prompt: str, text: str) -> str | None:
    """What a text says after its thought, which the prompt can have opened. None: the thought does
    not end."""
    opened = OPEN if prompt.rstrip().endswith(OPEN) else ""
    _, closed, rest = f"{opened}{text}".rpartition(CLOSE)
    if rest.lstrip().startswith(OPEN):
        return None
    return rest.lstrip("\n") if closed else rest
