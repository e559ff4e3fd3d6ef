"""Conversations to text, and which parts of that text are trained on.

Assistant spans are found by prefix rendering: the text of the turns before an answer, with the
header that opens it, must be a prefix of the text with the answer. Chat templates of most released
models have no `{% generation %}` block, so a mask from the template itself would be all zeros.
Positions decide, never token ids: a pad token that equals EOS cannot unmask or mask anything.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.cli import UserError

Messages = list[dict[str, Any]]
Piece = tuple[str, bool]
"""A run of text, and whether it is trained on."""

EMPTY_THOUGHT = re.compile(r"(<think>\s*</think>\n*)")
"""What templates write before an answer without a thought. To learn it is to unlearn thinking."""


class TemplateError(UserError):
    """This tokenizer's chat template cannot be used for training."""


@dataclass(frozen=True)
class Conversation:
    """A row as the chat template takes it."""

    messages: Messages
    tools: str = "[]"
    """As JSON, which can be compared."""
    learned: tuple[int, ...] = ()
    """Which assistant turns are trained on."""


@dataclass(frozen=True)
class Answer:
    """An assistant turn within its conversation."""

    before: str
    """All text that a server would send to get it, the header that opens it included."""
    until: str
    """All text up to its end."""
    masked: int = 0
    """Characters at its start that are not trained on: an empty thought of the template's own."""

    @property
    def start(self) -> int:
        return len(self.before) + self.masked

    @property
    def end(self) -> int:
        """Where the marker that ends it ends: what follows teaches nothing."""
        return max(self.start, len(self.until.rstrip("\n ")))


def conversation(row: dict, system_prompt: str | None, train_on: str) -> Conversation:
    """The conversation in a prepared row, cut after the last turn that is trained on."""
    turns = [
        {"role": turn["role"], "content": turn["content"], **json.loads(turn["extra"] or "{}")}
        for turn in row["messages"]
    ]
    weighed = [i for i, t in enumerate(row["messages"]) if t["role"] == "assistant" and t["train"]]
    messages = with_system(turns, system_prompt)
    learned = [index + len(messages) - len(turns) for index in weighed]
    if train_on == "last-turn":
        learned = learned[-1:]
    end = len(messages) if train_on == "all" else learned[-1] + 1
    return Conversation(messages[:end], row["tools"] or "[]", tuple(learned))


def with_system(messages: Messages, system_prompt: str | None) -> Messages:
    """Put the dataset's system turn before a row that has none."""
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


Job = tuple[Conversation, int, bool]
"""A conversation, how many of its turns are wanted, and whether a header follows them."""


def render(
    tokenizer: PreTrainedTokenizerBase, jobs: Iterable[Job], options: dict[str, Any]
) -> dict[tuple, str]:
    """Text for each job, by (id of the conversation, turns, header)."""
    alike: dict[tuple, list[Job]] = defaultdict(list)
    for job in jobs:
        alike[job[0].tools, job[2]].append(job)
    texts: dict[tuple, str] = {}
    for (tools, header), group in alike.items():
        kwargs = {**options, "tools": json.loads(tools) or None, "add_generation_prompt": header}
        rendered = render_alike(tokenizer, group, kwargs)
        texts |= {(id(c), n, header): t for (c, n, _), t in zip(group, rendered, strict=True)}
    return texts


def render_alike(tokenizer: PreTrainedTokenizerBase, jobs: list[Job], kwargs: dict) -> list[str]:
    """One call for many: a third of the time of a call for each."""
    chats = [talk.messages[:count] for talk, count, _ in jobs]
    try:
        return tokenizer.apply_chat_template(chats, tokenize=False, **kwargs)
    except Exception as error:  # a template is foreign code and can raise anything
        roles = ", ".join(message["role"] for message in culprit(tokenizer, chats, kwargs))
        raise TemplateError(
            f"the chat template refuses a row with the turns {roles}: {error}. Leave out what it "
            "does not know (a system turn, `system_prompt`), or set another `chat_template`."
        ) from None


def culprit(tokenizer: PreTrainedTokenizerBase, chats: list[Messages], kwargs: dict) -> Messages:
    """The first conversation that the template refuses."""
    for chat in chats:
        try:
            tokenizer.apply_chat_template(chat, tokenize=False, **kwargs)
        except Exception:
            return chat
    return chats[0]


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    examples: list[list[Piece]]
    """One, unless the template rewrites earlier turns (drops their thoughts, say): then each
    answer is learned after the very text that a server would send for it."""
    empty_thoughts: int
    """Answers before which the template wrote one."""


def render_conversations(
    tokenizer: PreTrainedTokenizerBase,
    talks: list[Conversation],
    train_on: str,
    options: dict[str, Any],
) -> list[Rendered]:
    """The pieces of each conversation. Raises TemplateError."""
    texts = render(tokenizer, wanted_texts(talks, train_on), options)
    how = whole_example if train_on == "all" else answer_examples
    return [how(talk, texts) for talk in talks]


def wanted_texts(talks: list[Conversation], train_on: str) -> Iterator[Job]:
    for talk in talks:
        for turn in skipped(talk) if train_on == "all" else talk.learned:
            yield talk, turn, True
            yield talk, turn + 1, False
        if train_on == "all":
            yield talk, len(talk.messages), False


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
    return Rendered(examples[::-1], sum(answer.masked > 0 for answer in found))


def answers(talk: Conversation, turns: Iterable[int], texts: dict[tuple, str]) -> list[Answer]:
    found = []
    for turn in turns:
        before, until = texts[id(talk), turn, True], texts[id(talk), turn + 1, False]
        if not until.startswith(before):
            raise TemplateError(
                "the chat template opens an answer in another way than it writes one, so the "
                "assistant's tokens cannot be told apart; set `chat_template: chatml` or `plain` "
                "under the model, or `template_options` if it has a switch for that"
            )
        check_calls(talk.messages[turn], until[len(before) :])
        masked = empty_thought(talk.messages[turn], until[len(before) :])
        found.append(Answer(before, until, masked))
    return found


def check_calls(message: dict[str, Any], text: str) -> None:
    """Many templates know no tool calls. What they write instead is an empty answer."""
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in text:
            raise TemplateError(
                "the chat template leaves out the tool calls of an answer, so it would be learned "
                "empty; set a `chat_template` that writes them, or leave such rows out"
            )


def empty_thought(message: dict[str, Any], text: str) -> int:
    """The length of an empty thought that the template wrote by itself."""
    found = EMPTY_THOUGHT.match(text, len(text) - len(text.lstrip()))
    own = message["content"].lstrip().startswith("<think>")
    return found.end() if found and not own else 0


def cut(text: str, spans: list[Answer]) -> list[Piece]:
    """The text up to the last answer's end, in pieces; the answers are trained on."""
    pieces, position = [], 0
    for answer in spans:
        pieces += [(text[position : answer.start], False), (text[answer.start : answer.end], True)]
        position = answer.end
    return [piece for piece in pieces if piece[0]]


def whole_example(talk: Conversation, texts: dict[tuple, str]) -> Rendered:
    """`train_on: all`: everything but the turns of weight 0, and empty thoughts."""
    text = texts[id(talk), len(talk.messages), False].rstrip("\n ")
    left_out = answers(talk, skipped(talk), texts)
    if not all(text.startswith(answer.until.rstrip("\n ")) for answer in left_out):
        raise TemplateError(
            "the chat template rewrites earlier turns, so a turn of weight 0 cannot be left out "
            "of `train_on: all`; use `train_on: completions`"
        )
    rest = text[left_out[-1].end if left_out else 0 :]
    pieces: list[Piece] = []
    for piece, masked in (*cut(text, left_out), (rest, False)):
        parts = [piece] if masked else EMPTY_THOUGHT.split(piece)  # every second is a thought
        pieces += [(part, not masked and not i % 2) for i, part in enumerate(parts) if part]
    thoughts = len(EMPTY_THOUGHT.findall(text))
    return Rendered([pieces], thoughts)


def prompt_text(
    tokenizer: PreTrainedTokenizerBase, talk: Conversation, options: dict[str, Any]
) -> str:
    """What a server is sent to get the last turn."""
    count = len(talk.messages) - 1
    return render(tokenizer, [(talk, count, True)], options)[id(talk), count, True]


def reference_text(
    tokenizer: PreTrainedTokenizerBase, talk: Conversation, prompt: str, options: dict[str, Any]
) -> str:
    """What the last turn says; of tool calls, what the template makes of them."""
    count, last = len(talk.messages), talk.messages[-1]
    if "tool_calls" not in last:
        return last["content"]
    text = render(tokenizer, [(talk, count, False)], options)[id(talk), count, False]
    ids = tokenizer(text[len(prompt) :], add_special_tokens=False)["input_ids"]
    return tokenizer.decode(ids, skip_special_tokens=True).strip()
