"""Prepared rows to examples of token ids: conversations, plain text, and labelled text."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.chat import (
    Conversation,
    Messages,
    TemplateError,
    conversation,
)
from finetune.cli import UserError
from finetune.encoding import (
    IGNORED,
    Example,
    TextEncoder,
    tokenize,
    truncated,
)
from finetune.lint import Counts, control_tokens, holds_control_token
from finetune.spans import Rendered, render_conversations

Encoded = tuple[str, list[int], list[int] | int]
"""The id of the row, token ids, and their labels or the index of a class."""


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, **options: Any
) -> list[Example]:
    """The examples of one conversation, all answers of which are trained on."""
    answers = (i for i, message in enumerate(messages) if message["role"] == "assistant")
    talk = Conversation(messages, learned=tuple(answers))
    [rendered] = render_conversations(tokenizer, [talk], "completions", options)
    return list(TextEncoder(tokenizer).encode(rendered.examples))


class Encoder:
    """Encodes rows for one tokenizer, and counts what becomes of them."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: dict[str, Any],
        classes: dict[str, int] | None = None,
    ) -> None:
        self.tokenizer, self.settings, self.classes = tokenizer, settings, classes
        self.text = TextEncoder(tokenizer)
        self.size = settings["max_length"]
        self.pattern = control_tokens(tokenizer)
        self.counts = Counts()

    def encode(self, rows: list[dict]) -> list[Encoded]:
        """The examples of some rows. A row can give several, or none."""
        self.counts.what["rows"] += len(rows)
        for row in rows:
            self.counts.what["control_tokens"] += holds_control_token(row, self.pattern)
        if self.classes is not None:
            return self.labelled(rows)
        talks = [row for row in rows if row["messages"]]
        texts = [row for row in rows if not row["messages"]]
        return (self.conversations(talks) if talks else []) + self.plain(texts)

    def conversations(self, rows: list[dict]) -> list[Encoded]:
        if self.tokenizer.chat_template is None:
            raise UserError(
                "this model has no chat template. Set `chat_template: plain` under the model (a "
                "base model: text, newline, answer), or `chatml`, or a Jinja file of your own."
            )
        rendered = self.render(rows)
        pieces = (example for one in rendered for example in one.examples)
        encoded = self.text.encode(list(pieces))
        out: list[Encoded] = []
        for row, one in zip(rows, rendered, strict=True):
            self.counts.what["rewritten"] += len(one.examples) > 1
            self.counts.what["empty_thoughts"] += one.empty_thoughts
            out += self.fitted(row, [next(encoded) for _ in one.examples])
        return out

    def render(self, rows: list[dict]) -> list[Rendered]:
        settings = self.settings
        train_on = settings["train_on"]
        talks = [conversation(row, settings["system_prompt"], train_on) for row in rows]
        try:
            return render_conversations(
                self.tokenizer, talks, train_on, settings["template_options"]
            )
        except TemplateError as error:
            if len(rows) == 1:
                raise TemplateError(f"{rows[0]['id']}: {error}") from None
            for row in rows:  # one of them fails again, and is named
                self.render([row])
            raise

    def fitted(self, row: dict, examples: list[Example]) -> list[Encoded]:
        """What is left of a conversation at max_length."""
        what, kept = self.counts.what, []
        self.counts.uncut.extend(len(example.input_ids) for example in examples)
        fits = [self.fit(row["id"], example) for example in examples]
        for example, fit in zip(examples, fits, strict=True):
            if fit is not None and fit.labels.count(IGNORED) < len(fit.labels):
                ends = fit is example or self.settings["truncate"] == "start"
                self.counts.example(fit, self.text, ends)
                kept.append((row["id"], fit.input_ids, fit.labels))
        if not kept:
            what["too_long" if None in fits else "unsupervised"] += 1
        elif any(fit is not example for example, fit in zip(examples, fits, strict=True)):
            what["truncated"] += 1
        return kept

    def fit(self, name: str, example: Example) -> Example | None:
        """The example itself, a shorter one, or None if it is to be dropped."""
        if len(example.input_ids) <= self.size:
            return example
        if (side := self.side(name, len(example.input_ids))) is None:
            return None
        return truncated(example, self.size, side, self.tokenizer.bos_token_id)

    def side(self, name: str, length: int) -> str | None:
        """Where a row that is too long is cut; None to drop it."""
        truncate = self.settings["truncate"]
        if truncate == "error":
            raise UserError(
                f"{name} has {length} tokens, more than max_length {self.size} (`truncate: "
                "error`). Raise max_length, shorten the row, or choose drop, start or end."
            )
        return None if truncate == "drop" else truncate

    def plain(self, rows: list[dict]) -> list[Encoded]:
        """Text of any length, in parts of at most max_length."""
        out: list[Encoded] = []
        ids = tokenize(self.tokenizer, [row["text"] for row in rows])
        for row, tokens in zip(rows, ids, strict=True):
            parts = self.text.parts(tokens, self.size) if tokens else []
            self.counts.what["unsupervised"] += not parts  # the tokenizer knows nothing of it
            for part in parts:
                self.counts.uncut.append(len(part.input_ids))
                self.counts.example(part, self.text, ends=part is parts[-1])
                out.append((row["id"], part.input_ids, part.labels))
        return out

    def labelled(self, rows: list[dict]) -> list[Encoded]:
        """Text with the special tokens that the tokenizer adds, and its class."""
        out: list[Encoded] = []
        ids = tokenize(self.tokenizer, [row["text"] for row in rows], with_special=True)
        self.counts.uncut.extend(map(len, ids))
        for row, tokens in zip(rows, ids, strict=True):
            fit = self.shorter(row, tokens) if len(tokens) > self.size else tokens
            if fit is None or len(fit) <= self.text.special:
                self.counts.what["too_long" if fit is None else "unsupervised"] += 1
                continue
            self.counts.what["truncated"] += fit is not tokens
            self.counts.labels[row["label"]] += 1
            self.counts.ids(fit, self.text)
            out.append((row["id"], fit, self.classes[row["label"]]))
        return out

    def shorter(self, row: dict, tokens: list[int]) -> list[int] | None:
        """Cut by the tokenizer, which keeps its special tokens at both ends."""
        if (side := self.side(row["id"], len(tokens))) is None:
            return None
        backend = self.tokenizer.backend_tokenizer
        backend.enable_truncation(self.size, direction={"start": "left", "end": "right"}[side])
        ids = backend.encode(row["text"]).ids
        backend.no_truncation()
        return ids
