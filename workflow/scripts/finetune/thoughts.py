"""What reasoning models think before they answer: `<think>…</think>` in their text.

The harmony format of gpt-oss (https://cookbook.openai.com/articles/openai-harmony) has messages of
the analysis channel instead; they are read as such text.
"""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"
EMPTY_THOUGHT = re.compile(rf"({OPEN}\s*{CLOSE}\n*)")
"""What some templates write before an answer without a thought: in the prompt where they are told
that there is none to come (`enable_thinking: false`), else in the answer."""
CHANNEL, FINAL = "<|channel|>", "<|channel|>final<|message|>"
ANALYSIS = re.compile(
    r"<\|channel\|>analysis<\|message\|>(.*?)(?:(<\|end\|>)(?:<\|start\|>assistant)?|\Z)", re.DOTALL
)
"""A message of the channel, which may have been cut, and the header of the next."""
KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names of a turn's reasoning; transformers hands it to a template by those that templates read."""


def is_skipped(prompt: str) -> bool:
    """Whether a prompt holds the thought already, so that the answer itself follows."""
    return prompt.rstrip().endswith(CLOSE)


def reasoning(message: dict) -> str:
    """The reasoning of a turn that holds it apart from its content."""
    return str(next((message[key] for key in KEYS if message.get(key)), "")).strip()


def readable(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of what follows a prompt, without special tokens. Those of harmony are all that
    tells a thought and the header of an answer from the answer: they are read before."""
    if CHANNEL in tokenizer.get_added_vocab():
        text = ANALYSIS.sub(as_tags, tokenizer.decode(ids)).replace(FINAL, "")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer.decode(ids, skip_special_tokens=True)


def as_tags(message: re.Match[str]) -> str:
    return f"{OPEN}\n{message[1]}" + (f"\n{CLOSE}\n\n" if message[2] else "")


def said(prompt: str, text: str) -> str | None:
    """What a text says after its thought, which the prompt can have opened. None: the thought does
    not end."""
    opened = OPEN if prompt.rstrip().endswith(OPEN) else ""
    _, closed, rest = f"{opened}{text}".rpartition(CLOSE)
    if rest.lstrip().startswith(OPEN):
        return None
    return rest.lstrip("\n") if closed else rest
