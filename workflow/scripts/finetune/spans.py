"""Which parts of a rendered conversation are trained on.

Assistant spans are found by prefix rendering: the text of the turns before an answer, with the
header that opens it, must be a prefix of the text with the answer. A server's prompt ends there, so
all that follows is trained on: an empty thought of the template's too, if its prompts hold none.
Chat templates of most released models have no `{% generation %}` block, so a mask from the template
itself would be all zeros. Positions decide, never token ids: a pad token that equals EOS cannot
unmask or mask anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.chat import Conversation, Job, TemplateError, render
from finetune.thoughts import EMPTY_THOUGHT, KEYS, SKIPPED, is_skipped, reasoning

Piece = tuple[str, bool]
"""A run of text, and whether it is trained on."""

LETTERS = 10_000_000
"""About as many are rendered at once, if no conversation has more."""


@dataclass(frozen=True)
class Answer:
    """An assistant turn within its conversation."""

    before: str
    """All text that a server would send to get it, the header that opens it included."""
    until: str
    """All text up to its end."""

    @property
    def start(self) -> int:
        return len(self.before)

    @property
    def end(self) -> int:
        """Where the marker that ends it ends: what follows teaches nothing."""
        return max(self.start, len(self.until.rstrip("\n ")))


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    examples: list[list[Piece]]
    """One, unless the template rewrites earlier turns (drops their thoughts, say): then each
    answer is learned after the very text that a server would send for it."""

    @property
    def empty_thoughts(self) -> int:
        """How many are trained on."""
        learned = (text for example in self.examples for text, learned in example if learned)
        return sum(len(SKIPPED.findall(text)) for text in learned)


def render_conversations(
    tokenizer: PreTrainedTokenizerBase,
    talks: list[Conversation],
    train_on: str,
    options: dict[str, Any],
) -> list[Rendered]:
    """The pieces of each conversation. Raises TemplateError."""
    how = whole_example if train_on == "all" else answer_examples
    rendered: list[Rendered] = []
    for group in groups(talks):
        texts = render(tokenizer, wanted_texts(group, train_on), options)
        rendered += [how(talk, texts) for talk in group]
    return rendered


def groups(talks: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    """Conversations to render at once. The text up to each answer is rendered, so that of many
    long ones with many answers would not fit in memory together."""
    group, letters = [], 0
    for talk in talks:
        group.append(talk)
        letters += (1 + len(talk.learned)) * sum(len(m["content"]) for m in talk.messages)
        if letters >= LETTERS:
            yield group
            group, letters = [], 0
    if group:
        yield group


def wanted_texts(talks: list[Conversation], train_on: str) -> Iterator[Job]:
    for talk in talks:
        for turn in needed(talk) if train_on == "all" else talk.learned:
            yield talk, turn, True
            yield talk, turn + 1, False


def needed(talk: Conversation) -> list[int]:
    """Turns of `train_on: all` that are looked at by themselves: the last, with which the text is
    whole, those of weight 0, and those that a template may not write whole."""
    told = {i for i in talk.learned if reasoning(m := talk.messages[i]) or "tool_calls" in m}
    return sorted({*skipped(talk), *told, len(talk.messages) - 1})


def skipped(talk: Conversation) -> list[int]:
    """Assistant turns of weight 0."""
    assistant = (i for i, m in enumerate(talk.messages) if m["role"] == "assistant")
    return [index for index in assistant if index not in talk.learned]


def answer_examples(talk: Conversation, texts: dict[tuple, str]) -> Rendered:
    """Pieces of which the learned answers are trained on, each answer in one example."""
    found = answers(talk, talk.learned, texts)
    waiting, examples = found, []
    while waiting:
        text = waiting[-1].until
        fitting = [answer for answer in waiting if text.startswith(answer.until)]
        examples.append(cut(text, fitting))
        waiting = [answer for answer in waiting if not text.startswith(answer.until)]
    return Rendered(examples[::-1])


def answers(talk: Conversation, turns: Iterable[int], texts: dict[tuple, str]) -> list[Answer]:
    found = []
    for turn in turns:
        before, until = texts[id(talk), turn, True], texts[id(talk), turn + 1, False]
        if not until.startswith(before):
            raise TemplateError(
                "the chat template opens an answer in another way than it writes one, so the "
                "assistant's tokens cannot be told apart; set `chat_template: chatml` or `plain` "
                "under the model, or `template_options` if it has a switch for that, such as "
                "`enable_thinking`"
            )
        check_whole(talk, turn, texts)
        found.append(Answer(before, until))
    return found


def check_whole(talk: Conversation, turn: int, texts: dict[tuple, str]) -> None:
    """Many templates know no tool calls, and what they write instead is an empty answer; many
    know no reasoning, and write the answer without."""
    message = talk.messages[turn]
    text = texts[id(talk), turn + 1, False].removeprefix(texts[id(talk), turn, True])
    if any(call["function"]["name"] not in text for call in message.get("tool_calls") or ()):
        raise TemplateError(
            "the chat template leaves out the tool calls of an answer, so it would be learned "
            "empty; set a `chat_template` that writes them, or leave such rows out"
        )
    if reasoning(message) not in text:
        raise TemplateError(
            "the chat template leaves out the reasoning of an answer, so it would not be learned; "
            "set a `chat_template` that writes it, or take it out of the rows "
            f"({', '.join(f'`{key}`' for key in KEYS)})"
        )


def cut(text: str, spans: list[Answer]) -> list[Piece]:
    """The text up to the last answer's end, in pieces; the answers are trained on."""
    pieces, position = [], 0
    for answer in spans:
        pieces += [(text[position : answer.start], False), (text[answer.start : answer.end], True)]
        position = answer.end
    return [piece for piece in pieces if piece[0]]


def whole_example(talk: Conversation, texts: dict[tuple, str]) -> Rendered:
    """`train_on: all`: everything but the turns of weight 0, and empty thoughts that are given."""
    for turn in needed(talk):
        check_whole(talk, turn, texts)
    last = len(talk.messages) - 1
    text = texts[id(talk), last + 1, False].rstrip("\n ")
    left_out = answers(talk, skipped(talk), texts)
    if not all(text.startswith(answer.until.rstrip("\n ")) for answer in left_out):
        raise TemplateError(
            "the chat template rewrites earlier turns, so a turn of weight 0 cannot be left out "
            "of `train_on: all`; use `train_on: completions`"
        )
    rest = text[left_out[-1].end if left_out else 0 :]
    given = is_skipped(texts[id(talk), last, True])
    pieces: list[Piece] = []
    for piece, masked in (*cut(text, left_out), (rest, False)):
        parts = EMPTY_THOUGHT.split(piece) if given else [piece]  # every second is a thought
        pieces += [(part, not masked and not i % 2) for i, part in enumerate(parts) if part]
    return Rendered([pieces])
