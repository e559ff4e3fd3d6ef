"""Formats: told from the columns, or an error with the line to write."""

from __future__ import annotations

import pytest

from finetune.cli import UserError
from finetune.formats import NEEDS, TURNS, canonical, find_format
from finetune.json_text import RowError

PAIR = ("prompt", "completion")


def rows(*columns: str) -> list[dict]:
    return [dict.fromkeys(columns)]


@pytest.mark.parametrize(
    ("columns", "mapped", "expected"),
    [
        (["messages"], {}, "messages"),
        (["conversations", "id"], {}, "sharegpt"),
        (["instruction", "input", "output"], {}, "alpaca"),
        (["instruction", "output"], {}, "alpaca"),
        ([*PAIR, "user"], {}, "prompt-completion"),
        (["text"], {}, "text"),
        (["text", "label"], {}, "text-label"),
        (["messages", "prompt"], {}, "messages"),
        (["q", "a"], {"prompt": "q", "completion": "a"}, "prompt-completion"),
        (["talk"], {"messages": "talk"}, "messages"),
        (["sentence", "intent"], {"text": "sentence", "label": "intent"}, "text-label"),
        # a mapped name no longer means what it says
        ([*PAIR, "talk"], {"messages": "talk", "prompt": "other"}, "messages"),
        (["messages", "a"], {"prompt": "messages", "completion": "a"}, None),
        (PAIR, {"prompt": "completion", "completion": "prompt"}, "prompt-completion"),
    ],
)
def test_format_from_the_columns(columns, mapped, expected) -> None:
    if expected is None:
        with pytest.raises(UserError, match="fits messages and prompt-completion"):
            find_format(rows(*columns), "x.csv", mapped)
    else:
        assert find_format(rows(*columns), "x.csv", mapped) == expected


def test_most_rows_decide() -> None:
    many = rows("messages") + rows("text") * 2
    assert find_format(many, "x", {}) == "text"


ALL = (
    "`messages`, or `conversations`, or `instruction` and `output`, or `prompt` and `completion`, "
    "or `text` and `label`, or `text`"
)


@pytest.mark.parametrize(
    ("columns", "mapped", "text"),
    [
        (
            ["messages", *PAIR],
            {},
            "x.csv fits messages and prompt-completion (columns: messages, prompt, completion). "
            "Set `format: messages` or `format: prompt-completion` under the dataset.",
        ),
        (
            ["instruction", "output", "text"],
            {},
            "x.csv fits alpaca and text (columns: instruction, output, text). Set "
            "`format: alpaca` or `format: text` under the dataset.",
        ),
        (
            ["Question", "answer", "n"],
            {},
            f"x.csv has the columns: Question, answer, n. Needed: {ALL}. Map yours under the "
            "dataset, e.g. `columns: {prompt: Question, completion: answer}`.",
        ),
        (
            ["chat"],
            {},
            f"x.csv has the columns: chat. Needed: {ALL}. Map yours under the dataset, e.g. "
            "`columns: {messages: chat}`.",
        ),
        (
            ["sentence", "intent"],
            {},
            f"x.csv has the columns: sentence, intent. Needed: {ALL}. Map yours under the "
            "dataset, e.g. `columns: {text: sentence, label: intent}`.",
        ),
        (
            ["a", "b"],
            {},
            f"x.csv has the columns: a, b. Needed: {ALL}. Map yours under the dataset, e.g. "
            "`columns: {prompt: your question column, completion: your answer column}`.",
        ),
        (
            PAIR,
            {"prompt": "question"},
            "x.csv has the columns: prompt, completion. Needed: "
            f"{ALL.replace('`prompt`', '`question`')}. Map yours under the dataset, e.g. "
            "`columns: {prompt: prompt, completion: completion}`.",
        ),
        (
            [],
            {},
            f"x.csv has the columns: none. Needed: {ALL}. Map yours under the dataset, e.g. "
            "`columns: {prompt: your question column, completion: your answer column}`.",
        ),
    ],
)
def test_format_that_cannot_be_found(columns, mapped, text) -> None:
    with pytest.raises(UserError) as caught:
        find_format(rows(*columns), "x.csv", mapped)
    assert str(caught.value) == text


def test_format_that_is_said() -> None:
    both = rows("messages", *PAIR)
    assert find_format(both, "x.csv", {}, "prompt-completion") == "prompt-completion"
    labelled = rows("text", "label")
    assert find_format(labelled, "x.csv", {}, "text") == "text"
    with pytest.raises(UserError) as caught:
        find_format(rows("chat", "text"), "x.csv", {}, "messages")
    assert str(caught.value) == (
        "x.csv has the columns: chat, text. Needed: `messages`. Map yours under the dataset, e.g. "
        "`columns: {messages: chat}`."
    )


def test_every_format_with_turns_can_be_read() -> None:
    assert set(NEEDS) == {*TURNS, "text", "text-label"}


def test_columns_map_our_names_to_the_users() -> None:
    row = {"question": "Hi.", "answer": "Yes?", "prompt": "another", "sys": "Be brief."}
    columns = {"prompt": "question", "completion": "answer", "system": "sys"}
    turns = canonical(row, "prompt-completion", columns)["messages"]
    assert [turn["content"] for turn in turns] == ["Be brief.", "Hi.", "Yes?"]


@pytest.mark.parametrize(
    ("written", "label"),
    [
        ("yes", "yes"),
        (" yes ", "yes"),
        (3, "3"),
        (3.0, "3"),
        (-1, "-1"),
        (True, "True"),
        (False, "False"),
        (0, "0"),
        (0.0, "0"),
    ],
)
def test_labels(written, label) -> None:
    row = {"text": "Hi.", "label": written}
    assert canonical(row, "text-label", {}) == {
        "messages": None,
        "tools": None,
        "text": "Hi.",
        "label": label,
    }


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (None, "label is missing"),
        ("", "label is empty"),
        (0.5, "label is float, not text"),
        (float("nan"), "label is float, not text"),
        (float("inf"), "label is float, not text"),
        ([1], "label is list, not text"),
        ("\ud83d", "label holds a lone surrogate, which is no text"),
    ],
)
def test_bad_labels(label, reason) -> None:
    with pytest.raises(RowError) as caught:
        canonical({"text": "Hi.", "label": label}, "text-label", {})
    assert str(caught.value) == reason


@pytest.mark.parametrize("format", ["text", "text-label"])
def test_text_that_cannot_be_used(format) -> None:
    for value, reason in ((None, "missing"), (" ", "empty"), (3, "int, not text")):
        with pytest.raises(RowError) as caught:
            canonical({"text": value, "label": "x"}, format, {})
        assert str(caught.value) == f"text is {reason}"
