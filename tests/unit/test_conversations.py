"""Conversations: every way to write one gives the same turns; every bad one has its reason."""

from __future__ import annotations

import json

import pytest

from finetune.formats import canonical
from finetune.json_text import RowError

TOO_DEEP = (
    "not JSON: maximum recursion depth exceeded while decoding a JSON array from a unicode string"
)


def turn(role: str, content: str = "", train: bool = True, **extra: object) -> dict:
    """As it is in a prepared row."""
    written = json.dumps(extra, ensure_ascii=False, sort_keys=True) if extra else None
    return {"role": role, "content": content, "train": train, "extra": written}


def call(arguments: object, **more: object) -> dict:
    return more | {"type": "function", "function": {"name": "f", "arguments": arguments}}


def said(role: str, content: object = "x", **more: object) -> dict:
    """As people write it."""
    return {"role": role, "content": content} | more


def gpt(name: str, value: object = "x") -> dict:
    return {"from": name, "value": value}


SYSTEM, USER, BOT = said("system", "Be brief."), said("user", "Hi."), said("assistant", "Yes?")
PLAIN = [turn("user", "Hi."), turn("assistant", "Yes?")]
BRIEF = [turn("system", "Be brief."), *PLAIN]
CALLED = [
    turn("user", "x"),
    turn("assistant", tool_calls=[call({"x": 1})]),
    turn("tool", "7"),
    turn("assistant", "x"),
]
BARE_CALL = {"name": "f", "arguments": {"x": 1}}

GOOD: dict[str, tuple[str, dict, list]] = {
    # messages
    "messages": ("messages", {"messages": [USER, BOT]}, PLAIN),
    "as JSON text": ("messages", {"messages": json.dumps([USER, BOT])}, PLAIN),
    "system turn": ("messages", {"messages": [SYSTEM, USER, BOT]}, BRIEF),
    "developer turn": (
        "messages",
        {"messages": [said("developer", "Be brief."), USER, BOT]},
        BRIEF,
    ),
    "system column": ("messages", {"messages": [USER, BOT], "system": "Be brief."}, BRIEF),
    "empty system column": ("messages", {"messages": [USER, BOT], "system": ""}, PLAIN),
    "several rounds": ("messages", {"messages": [USER, BOT] * 3}, PLAIN * 3),
    "other keys": ("messages", {"messages": [USER | {"id": 3, "refusal": None}, BOT]}, PLAIN),
    "weights": (
        "messages",
        {
            "messages": [
                USER,
                BOT | {"weight": 0},
                USER,
                BOT | {"weight": 1},
                USER,
                BOT | {"weight": None},
            ]
        },
        [PLAIN[0], turn("assistant", "Yes?", False), *PLAIN, *PLAIN],
    ),
    "parts": (
        "messages",
        {
            "messages": [
                said("user", [{"type": "text", "text": "H"}, {"type": "text", "text": "i."}]),
                BOT,
            ]
        },
        PLAIN,
    ),
    "text is kept as it is": (
        "messages",
        {"messages": [said("user", "  a\n"), said("assistant", "\tb \0\U0001f600")]},
        [turn("user", "  a\n"), turn("assistant", "\tb \0\U0001f600")],
    ),
    "what templates read": (
        "messages",
        {"messages": [USER | {"name": "Ann"}, BOT | {"reasoning_content": "Hm, é"}]},
        [turn("user", "Hi.", name="Ann"), turn("assistant", "Yes?", reasoning_content="Hm, é")],
    ),
    # tool calls
    "arguments as text": (
        "messages",
        {
            "messages": [
                said("user"),
                said("assistant", None, tool_calls=[call('{"x": 1}')]),
                said("tool", "7"),
                said("assistant"),
            ]
        },
        CALLED,
    ),
    "arguments as an object": (
        "messages",
        {
            "messages": [
                said("user"),
                said("assistant", "", tool_calls=[call({"x": 1}, id=None)]),
                said("tool", "7"),
                said("assistant", tool_calls=[]),
            ]
        },
        CALLED,
    ),
    "older form": (
        "messages",
        {
            "messages": [
                said("user"),
                {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
                said("function", "7"),
                said("assistant"),
            ]
        },
        CALLED,
    ),
    "bare call": (
        "messages",
        {
            "messages": [
                said("user"),
                said("assistant", None, tool_calls=[BARE_CALL]),
                said("tool", "7"),
                said("assistant"),
            ]
        },
        CALLED,
    ),
    "ids": (
        "messages",
        {
            "messages": [
                said("user"),
                said("assistant", "Wait.", tool_calls=[call("", id="a"), call(None, id="b")]),
                said("tool", None, tool_call_id="a"),
                said("tool", "", tool_call_id="b"),
                said("assistant"),
            ]
        },
        [
            turn("user", "x"),
            turn("assistant", "Wait.", tool_calls=[call({}, id="a"), call({}, id="b")]),
            turn("tool", tool_call_id="a"),
            turn("tool", tool_call_id="b"),
            turn("assistant", "x"),
        ],
    ),
    "a null argument is one": (
        "messages",
        {"messages": [said("user"), said("assistant", None, tool_calls=[call({"x": None})])]},
        [turn("user", "x"), turn("assistant", tool_calls=[call({"x": None})])],
    ),
    # ShareGPT
    "ShareGPT": ("sharegpt", {"conversations": [gpt("human", "Hi."), gpt("gpt", "Yes?")]}, PLAIN),
    "ShareGPT, with a system": (
        "sharegpt",
        {
            "conversations": [
                gpt("system", "Be brief."),
                gpt("user", "Hi."),
                gpt("assistant", "Yes?"),
            ]
        },
        BRIEF,
    ),
    "ShareGPT, other keys": (
        "sharegpt",
        {"conversations": [USER, BOT], "system": "Be brief."},
        BRIEF,
    ),
    "ShareGPT, a call": (
        "sharegpt",
        {
            "conversations": [
                gpt("human"),
                gpt("function_call", json.dumps(BARE_CALL)),
                gpt("observation", "7"),
                gpt("gpt"),
            ]
        },
        CALLED,
    ),
    "ShareGPT, a list of calls": (
        "sharegpt",
        {
            "conversations": [
                gpt("human"),
                gpt("function_call", json.dumps([BARE_CALL])),
                gpt("observation", "7"),
                gpt("gpt"),
            ]
        },
        CALLED,
    ),
    # Alpaca
    "Alpaca": ("alpaca", {"instruction": "Hi.", "output": "Yes?"}, PLAIN),
    "Alpaca, no input": ("alpaca", {"instruction": "Hi.", "input": " \n", "output": "Yes?"}, PLAIN),
    "Alpaca, input": (
        "alpaca",
        {"instruction": "Add.", "input": "  1, 2", "output": "3"},
        [turn("user", "Add.\n\n  1, 2"), turn("assistant", "3")],
    ),
    "Alpaca, history": (
        "alpaca",
        {
            "instruction": "Hi.",
            "output": "Yes?",
            "history": [["Hi.", "Yes?"]],
            "system": "Be brief.",
        },
        [BRIEF[0], *PLAIN, *PLAIN],
    ),
    "Alpaca, history as text": (
        "alpaca",
        {"instruction": "Hi.", "output": "Yes?", "history": '[["Hi.", "Yes?"]]'},
        [*PLAIN, *PLAIN],
    ),
    "Alpaca, no history": (
        "alpaca",
        {"instruction": "Hi.", "output": "Yes?", "history": ""},
        PLAIN,
    ),
    # prompt and completion
    "pair": ("prompt-completion", {"prompt": "Hi.", "completion": "Yes?"}, PLAIN),
    "pair, system column": (
        "prompt-completion",
        {"prompt": "Hi.", "completion": "Yes?", "system": "Be brief."},
        BRIEF,
    ),
    "pair of lists": ("prompt-completion", {"prompt": [SYSTEM, USER], "completion": [BOT]}, BRIEF),
    "pair of lists: no answer of the prompt is trained on": (
        "prompt-completion",
        {"prompt": [USER, BOT, USER], "completion": [BOT]},
        [PLAIN[0], turn("assistant", "Yes?", False), *PLAIN],
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_conversation(name) -> None:
    format, row, turns = GOOD[name]
    assert canonical(row, format, {})["messages"] == turns


NO_ROLE = "a turn needs a role: system, user, assistant or tool"
NO_OBJECT = "a turn is no object with role and content"
NO_LIST = "messages is not a list, or is empty"
PARTS = "user content has parts that are not text; only text can be trained on"
WEIGHT = "the weight of a turn is neither 0 nor 1"
NO_NAME = "a tool call has no function name"
ARGUMENTS = "the arguments of a tool call"
FIRST = "turns out of order: assistant comes first"


def calling(*calls: object) -> list:
    return [USER, said("assistant", None, tool_calls=list(calls))]


BAD_MESSAGES: dict[str, tuple[object, str]] = {
    "missing": (None, "messages is missing"),
    "object": ({"role": "user"}, NO_LIST),
    "number": (3, NO_LIST),
    "empty": ([], NO_LIST),
    "text, no JSON": ("Hi.", "messages is text, but not JSON: Expecting value"),
    "text, key twice": ('[{"a": 1, "a": 1}]', "messages is text, but a key appears twice"),
    "text, too deep": ("[" * 100_000, f"messages is text, but {TOO_DEEP}"),
    "text, no list": ('{"role": "user"}', NO_LIST),
    "turn is text": (["Hi.", "Yes?"], NO_OBJECT),
    "turn is null": ([None], NO_OBJECT),
    "no role": ([{"content": "Hi."}], NO_ROLE),
    "role is null": ([said(None)], NO_ROLE),
    "role is a list": ([said(["user"])], NO_ROLE),
    "role is a number": ([said(1)], NO_ROLE),
    "role is unknown": ([said("critic")], NO_ROLE),
    # content
    "no content": ([{"role": "user"}, BOT], "user content is missing"),
    "null content": ([USER, said("assistant", None)], "assistant content is missing"),
    "empty content": ([said("user", " \n\t\u3000"), BOT], "user content is empty"),
    "content is a number": ([said("user", 3), BOT], "user content is int, not text"),
    "content is false": ([USER, said("assistant", False)], "assistant content is bool, not text"),
    "tool's is an object": (
        [*calling(BARE_CALL), said("tool", {}), BOT],
        "tool content is dict, not text",
    ),
    "lone surrogate": (
        [said("user", "a\ud83d"), BOT],
        "user content holds a lone surrogate, which is no text",
    ),
    "surrogate in a name": (
        [USER | {"name": "\ud83d"}, BOT],
        "a turn holds a lone surrogate, which is no text",
    ),
    "image": ([said("user", [{"type": "image_url"}]), BOT], PARTS),
    "odd part": ([said("user", [{"type": ["text"]}]), BOT], PARTS),
    "part is text": ([said("user", ["Hi."]), BOT], PARTS),
    "part without text": ([said("user", [{"type": "text"}]), BOT], "user content is missing"),
    "parts say nothing": ([said("user", []), BOT], "user content is empty"),
    # weights
    "half": ([USER, BOT | {"weight": 0.5}], WEIGHT),
    "weight is text": ([USER, BOT | {"weight": "1"}], WEIGHT),
    "weight is a list": ([USER, BOT | {"weight": [1]}], WEIGHT),
    "all weights are 0": (
        [USER, BOT | {"weight": 0}] * 2,
        "every assistant turn has weight 0, so nothing can be learned",
    ),
    # tool calls
    "call is text": (calling("f"), NO_NAME),
    "no name": (calling({"function": {"arguments": {}}}), NO_NAME),
    "function is text": (calling({"function": "f"}), NO_NAME),
    "calls are text": (
        [USER, BOT | {"tool_calls": "f()"}],
        "tool_calls is text, but not JSON: Expecting value",
    ),
    "arguments are no JSON": (calling(call("x=1")), f"{ARGUMENTS}: not JSON: Expecting value"),
    "arguments, key twice": (
        calling(call('{"x": 1, "x": 1}')),
        f"{ARGUMENTS}: a key appears twice",
    ),
    "arguments are a list": (calling(call([1])), f"{ARGUMENTS} are no object"),
    "arguments are a number": (calling(call("3")), f"{ARGUMENTS} are no object"),
    "NaN": (calling(call({"x": float("nan")})), "a turn holds NaN or Infinity, which is no JSON"),
    "ShareGPT call": (
        [gpt("human"), gpt("function_call", "f()")],
        "function_call: not JSON: Expecting value",
    ),
    "ShareGPT call is missing": (
        [gpt("human"), gpt("function_call", None)],
        "function_call: function_call is missing",
    ),
    # order
    "system alone": ([SYSTEM], "the last turn is the system's; it has to be the assistant's"),
    "user last": ([USER, BOT, USER], "the last turn is the user's; it has to be the assistant's"),
    "tool last": (
        [*calling(BARE_CALL), said("tool")],
        "the last turn is the tool's; it has to be the assistant's",
    ),
    "assistant first": ([BOT, USER, BOT], FIRST),
    "assistant after system": ([SYSTEM, BOT], "turns out of order: assistant after system"),
    "two users": ([USER, USER, BOT], "turns out of order: user after user"),
    "two assistants": ([USER, BOT, BOT], "turns out of order: assistant after assistant"),
    "system later": ([USER, BOT, SYSTEM, USER, BOT], "turns out of order: system after assistant"),
    "two systems": ([SYSTEM, SYSTEM, USER, BOT], "turns out of order: system after system"),
    "tool after user": ([USER, said("tool"), BOT], "turns out of order: tool after user"),
    "user after tool": (
        [*calling(BARE_CALL), said("tool"), USER, BOT],
        "turns out of order: user after tool",
    ),
}


def reason(format: str, row: dict) -> str:
    with pytest.raises(RowError) as caught:
        canonical(row, format, {})
    return str(caught.value)


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_conversation(name) -> None:
    value, expected = BAD_MESSAGES[name]
    assert reason("messages", {"messages": value}) == expected
    assert reason("sharegpt", {"conversations": value}) == expected.replace(
        "messages is", "conversations is"
    )


HISTORY = "history is not a list of [question, answer]"


@pytest.mark.parametrize(
    ("format", "row", "expected"),
    [
        (
            "messages",
            {"messages": [SYSTEM, USER, BOT], "system": "x"},
            "a system column and a system turn",
        ),
        ("messages", {"messages": [USER, BOT], "system": " "}, "system content is empty"),
        ("messages", {"messages": [USER, BOT], "system": 3}, "system content is int, not text"),
        ("prompt-completion", {"prompt": "a"}, "completion is missing"),
        ("prompt-completion", {"prompt": 3, "completion": "b"}, "prompt is int, not text"),
        ("prompt-completion", {"prompt": "a", "completion": {}}, "completion is dict, not text"),
        ("prompt-completion", {"prompt": " ", "completion": "b"}, "prompt is empty"),
        (
            "prompt-completion",
            {"prompt": [USER], "completion": "b"},
            "completion is text, but not JSON: Expecting value",
        ),
        (
            "prompt-completion",
            {"prompt": "a", "completion": [BOT]},
            "prompt is text, but not JSON: Expecting value",
        ),
        (
            "prompt-completion",
            {"prompt": [USER, BOT], "completion": [BOT]},
            "turns out of order: assistant after assistant",
        ),
        (
            "prompt-completion",
            {"prompt": [USER], "completion": [BOT | {"weight": 0}]},
            "every assistant turn has weight 0, so nothing can be learned",
        ),
        ("alpaca", {"output": "b"}, "instruction is missing"),
        ("alpaca", {"instruction": "a", "output": ""}, "output is empty"),
        ("alpaca", {"instruction": "a", "input": 0, "output": "b"}, "input is int, not text"),
        (
            "alpaca",
            {"instruction": "a", "output": "b", "history": "x"},
            "history is text, but not JSON: Expecting value",
        ),
        (
            "alpaca",
            {"instruction": "a", "output": "b", "history": {"q": "a"}},
            "history is not a list, or is empty",
        ),
        ("alpaca", {"instruction": "a", "output": "b", "history": ["q", "a"]}, HISTORY),
        ("alpaca", {"instruction": "a", "output": "b", "history": [["q"]]}, HISTORY),
        (
            "alpaca",
            {"instruction": "a", "output": "b", "history": [["q", None]]},
            "assistant content is missing",
        ),
    ],
)
def test_other_bad_rows(format, row, expected) -> None:
    assert reason(format, row) == expected


TOOL = {"name": "f", "parameters": {"x": None}}
WRAPPED = '[{"function": {"name": "f", "parameters": {"x": null}}, "type": "function"}]'


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (None, None),
        ("", None),
        ("[]", None),
        ([], None),
        ([TOOL], WRAPPED),
        (json.dumps([TOOL]), WRAPPED),
        ([{"type": "function", "function": TOOL}], WRAPPED),
    ],
    ids=str,
)
def test_tools(tools, expected) -> None:
    row = {"messages": [USER, BOT], "tools": tools}
    assert canonical(row, "messages", {})["tools"] == expected
    row = {"prompt": "a", "completion": "b", "tools": tools}
    assert canonical(row, "prompt-completion", {})["tools"] == expected


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ("f", "tools is text, but not JSON: Expecting value"),
        ({"name": "f"}, "tools is not a list, or is empty"),
        (["f"], "a tool has no name"),
        ([TOOL, {"description": "x"}], "a tool has no name"),
        ([{"function": "f"}], "a tool has no name"),
        ([{"name": "\ud83d"}], "tools holds a lone surrogate, which is no text"),
        ([{"name": "f", "x": float("inf")}], "tools holds NaN or Infinity, which is no JSON"),
    ],
    ids=str,
)
def test_bad_tools(tools, expected) -> None:
    assert reason("messages", {"messages": [USER, BOT], "tools": tools}) == expected
