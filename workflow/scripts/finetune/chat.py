"""Conversations to tokens, and which of those tokens are trained on.

Assistant spans are found by prefix rendering: the text of the first k turns must be a prefix
of the text of the first k + 1. Chat templates of most released models have no
`{% generation %}` block, so a mask from the template itself would be all zeros. Positions
decide, never token ids: a pad token that equals EOS cannot unmask or mask anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from jinja2 import TemplateError as JinjaError
from transformers import PreTrainedTokenizerBase

from finetune.cli import UserError

IGNORED = -100
"""Label of a position that the loss skips, as in torch.nn.functional.cross_entropy."""

Messages = list[dict[str, str]]
Span = tuple[int, int]


class TemplateError(UserError):
    """This tokenizer's chat template cannot be used for training."""


@dataclass(frozen=True)
class Example:
    """One row ready for training: ids and labels of the same length."""

    input_ids: list[int]
    labels: list[int]


def with_system(messages: Messages, system_prompt: str | None) -> Messages:
    """Put the dataset's system turn before a row that has none."""
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, prompt: bool = False) -> str:
    """The conversation as text; `prompt` adds the header that opens the assistant's turn."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except JinjaError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise TemplateError(
            f"the chat template refuses a row with the turns {roles}: {error}. Leave out what it "
            "does not know (a system turn, `system_prompt`), or set another `chat_template`."
        ) from None


def assistant_spans(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[str, list]:
    """The whole text, and the character span [start, end) of each assistant turn.

    A span holds the turn's content and the marker that ends it, not the header before it.
    """
    whole = render(tokenizer, messages)
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(tokenizer, messages[:index], prompt=True)
            until = render(tokenizer, messages[: index + 1])
            if not (until.startswith(before) and whole.startswith(until)):
                raise TemplateError(
                    "the chat template rewrites earlier turns, so the assistant's tokens cannot "
                    "be told apart; set `chat_template: chatml` or `plain` under the model"
                )
            spans.append((len(before), len(until.rstrip("\n "))))
    return whole, spans


def encode(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> Example:
    """Token ids, and labels that hold the assistant's tokens and IGNORED elsewhere.

    The template writes the special tokens, so the tokenizer adds none: one BOS at most. EOS is
    added, and supervised, where the template ends the last turn without a marker of its own.
    """
    whole, spans = assistant_spans(tokenizer, messages)
    whole = whole[: spans[-1][1]]  # what follows the last end marker teaches nothing
    ids, offsets = tokenize(tokenizer, whole, [])
    edges = {edge for span in spans for edge in span}
    shared = {edge for edge in edges if any(start < edge < end for start, end in offsets)}
    if shared:  # one token for the header's end and the answer's start: a server has two
        ids, offsets = tokenize(tokenizer, whole, sorted(shared))
    labels = [
        token if any(left <= start < right for left, right in spans) else IGNORED
        for token, (start, _) in zip(ids, offsets, strict=True)
    ]
    if ids and ids[-1] not in end_tokens(tokenizer):
        ids.append(tokenizer.eos_token_id)
        labels.append(tokenizer.eos_token_id)
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        raise TemplateError("the chat template writes BOS twice; remove one from the template")
    return Example(ids, labels)


def tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str, cuts: list[int]
) -> tuple[list[int], list[Span]]:
    """Token ids and the characters of each. No token reaches over a cut."""
    ids: list[int] = []
    offsets: list[Span] = []
    for left, right in pairwise([0, *cuts, len(text)]):
        encoded = tokenizer(text[left:right], add_special_tokens=False, return_offsets_mapping=True)
        ids += encoded["input_ids"]
        offsets += [(left + start, left + end) for start, end in encoded["offset_mapping"]]
    return ids, offsets


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that can end a turn: EOS and the model's other special tokens (<|eot_id|>, …).

    Not the unknown token: it can be the last letter of an answer.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = set(tokenizer.all_special_ids) | {index for index, token in added if token.special}
    return special - {tokenizer.unk_token_id} | {tokenizer.eos_token_id}
