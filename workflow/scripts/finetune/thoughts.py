"""What reasoning models think before they answer: `<think>…</think>` in their text.

Others write it between special tokens, such as the analysis channel of the harmony format
(https://cookbook.openai.com/articles/openai-harmony). It is read as such text.
"""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"
EMPTY_THOUGHT = re.compile(rf"({OPEN}\s*{CLOSE}\n*)")
"""What some templates write before an answer without a thought: in the prompt where they are told
that there is none to come (`enable_thinking: false`), else in the answer."""
SKIPPED = re.compile(rf"(?:\A|{OPEN})\s*{CLOSE}")
"""An empty thought in a text that follows a prompt, which can have opened it."""
FORMS = (
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ("<|channel>thought\n", "<channel|>"),
)
"""How gpt-oss and Gemma 4 open and close a thought."""
FINAL = "<|channel|>final<|message|>"
"""What gpt-oss writes before an answer."""
KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names of a turn's reasoning; transformers hands it to a template by those that templates read."""


def is_skipped(prompt: str) -> bool:
    """Whether a prompt holds the thought already, so that the answer itself follows."""
    return prompt.rstrip().endswith(CLOSE)


def reasoning(message: dict) -> str:
    """The reasoning of a turn that holds it apart from its content."""
    return str(next((message[key] for key in KEYS if message.get(key)), "")).strip()


def readable(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of what follows a prompt, thoughts in `<think>…</think>`, without special tokens.
    Those are all that tells a thought of FORMS from the answer, so they are dropped last."""
    text = plain = tokenizer.decode(ids)
    for opened, closed in FORMS:
        if opened in text:
            text = text.replace(opened, f"{OPEN}\n").replace(closed, f"\n{CLOSE}\n\n")
    if (text := text.replace(FINAL, "")) != plain:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer.decode(ids, skip_special_tokens=True)


def said(prompt: str, text: str) -> str | None:
    """What a text says after its thought, which the prompt can have opened. None: the thought does
    not end."""
    opened = OPEN if prompt.rstrip().endswith(OPEN) else ""
    _, closed, rest = f"{opened}{text}".rpartition(CLOSE)
    if rest.lstrip().startswith(OPEN):
        return None
    return rest.lstrip("\n") if closed else rest
