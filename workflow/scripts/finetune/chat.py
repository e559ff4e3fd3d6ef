"""Conversations to text, by the chat template of a model."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.cli import UserError
from finetune.thoughts import readable

Messages = list[dict[str, Any]]


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
    return readable(tokenizer, ids).strip()
