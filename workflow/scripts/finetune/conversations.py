"""Conversations in one shape, from every shape that they come in.

A turn is `role` (system, user, assistant or tool), `content`, `train` (False for `weight: 0`) and
`extra`: the JSON of what chat templates may read besides (tool calls, reasoning, a name), or None.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import cycle
from typing import Any

from finetune.json_text import RowError, load_json
from finetune.values import listed, text

Turn = dict[str, Any]

ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "model", "bot", "function_call"),
    "tool": ("tool", "observation", "function_response", "function", "ipython"),
}
ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
PASSED_ON = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
"""Keys of a turn that released chat templates read."""
MAY_FOLLOW = {
    "system": (None,),
    "user": (None, "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""Which role can stand before each: what chat templates accept and training can learn from."""


def listed_turns(value: Any, name: str) -> list[Turn]:
    """Turns from a list of {role, content} or {from, value}."""
    return [to_turn(entry) for entry in listed(value, name)]


def to_turn(entry: Any) -> Turn:
    if not isinstance(entry, dict):
        raise RowError("a turn is no object with role and content")
    entry = {key: value for key, value in entry.items() if value is not None}
    named = entry.get("role", entry.get("from"))
    if (role := ROLE_OF.get(named) if isinstance(named, str) else None) is None:
        raise RowError("a turn needs a role: system, user, assistant or tool")
    content, extra = joined(entry.get("content", entry.get("value")), role), passed_on(entry)
    if named == "function_call":  # ShareGPT writes the call as the turn's text
        content, extra["tool_calls"] = None, [tool_call(call) for call in calls_in_text(content)]
    return turn(role, content, weight(entry.get("weight", 1)), extra)


def turn(role: str, content: Any, train: bool = True, extra: dict | None = None) -> Turn:
    if role == "tool" or (extra and "tool_calls" in extra):  # these may say nothing
        content = text("" if content is None else content, f"{role} content", empty=True)
    else:
        content = text(content, f"{role} content")
    return {"role": role, "content": content, "train": train, "extra": as_json(extra, "a turn")}


def passed_on(entry: dict) -> dict[str, Any]:
    """What a template may read of a turn besides role and content."""
    extra = {key: entry[key] for key in PASSED_ON if key in entry}
    if "function_call" in entry:  # the older form, of one call
        extra["tool_calls"] = [entry["function_call"]]
    if "tool_calls" in extra:
        calls = listed(extra["tool_calls"], "tool_calls") if extra["tool_calls"] else []
        extra["tool_calls"] = [tool_call(call) for call in calls]
        if not calls:
            del extra["tool_calls"]
    return extra


def as_json(value: Any, name: str) -> str | None:
    """None for nothing. Keys are sorted: their order is no difference between two rows."""
    if not value:
        return None
    try:
        written = json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False)
    except ValueError:
        raise RowError(f"{name} holds NaN or Infinity, which is no JSON") from None
    except TypeError:  # a date in a Parquet file
        raise RowError(f"{name} holds values that JSON has not") from None
    return text(written, name)


def joined(content: Any, role: str) -> Any:
    """The text of content that is a list of parts."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise RowError(f"{role} content has parts that are not text; only text can be trained on")
    return "".join(text(part.get("text"), f"{role} content", empty=True) for part in content)


def weight(value: Any) -> bool:
    if value not in (0, 1):
        raise RowError("the weight of a turn is neither 0 nor 1")
    return bool(value)


def calls_in_text(value: Any) -> list:
    """The tool calls that a ShareGPT `function_call` turn holds as JSON text."""
    try:
        call = load_json(text(value, "function_call"))
    except RowError as error:
        raise RowError(f"function_call: {error}") from None
    return call if isinstance(call, list) else [call]


def tool_call(call: Any) -> dict:
    """{type, function: {name, arguments}}, with the arguments as an object: templates write them
    as JSON themselves."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("a tool call has no function name")
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments)
        except RowError as error:
            raise RowError(f"the arguments of a tool call: {error}") from None
    if not isinstance(arguments, dict):
        raise RowError("the arguments of a tool call are no object")
    same = {} if call.get("id") is None else {"id": call["id"]}
    called = {"name": function["name"], "arguments": arguments}
    return {**same, "type": "function", "function": called}


def tool_list(value: Any) -> str | None:
    """The JSON of the tools that a conversation may call, each as {type, function}."""
    if value is None or value in ("", "[]", []):
        return None
    tools = [to_tool(tool) for tool in listed(value, "tools")]
    return as_json(tools, "tools")


def to_tool(tool: Any) -> dict:
    wrapped = isinstance(tool, dict) and "function" in tool
    function = tool["function"] if wrapped else tool
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("a tool has no name")
    return tool if wrapped else {"type": "function", "function": tool}


def alpaca_turns(get: Callable[[str], Any]) -> list[Turn]:
    """Instruction and, below an empty line, its input; earlier rounds from `history`."""
    prompt = text(get("instruction"), "instruction")
    given = text("" if get("input") is None else get("input"), "input", empty=True)
    if given.strip():
        prompt += f"\n\n{given}"
    rounds = listed(get("history"), "history") if get("history") else []
    if not all(isinstance(r, (list, tuple)) and len(r) == 2 for r in rounds):
        raise RowError("history is not a list of [question, answer]")
    said = [
        *(content for pair in rounds for content in pair),
        prompt,
        text(get("output"), "output"),
    ]
    return [turn(role, content) for role, content in zip(cycle(("user", "assistant")), said)]


def pair_turns(get: Callable[[str], Any]) -> list[Turn]:
    """Prompt and completion, as texts or as lists of turns. Only the completion is trained on."""
    prompt, completion = get("prompt"), get("completion")
    if isinstance(prompt, list) or isinstance(completion, list):
        turns = listed_turns(prompt, "prompt")
        before = [t | {"train": t["train"] and t["role"] != "assistant"} for t in turns]
        return before + listed_turns(completion, "completion")
    return [turn("user", text(prompt, "prompt")), turn("assistant", text(completion, "completion"))]


def with_system_column(turns: list[Turn], system: Any) -> list[Turn]:
    if not system:
        return turns
    if turns[0]["role"] == "system":
        raise RowError("a system column and a system turn")
    return [turn("system", system), *turns]


def check_turns(turns: list[Turn]) -> None:
    """[system] user (assistant tool*)+ …, the assistant last, with something to learn."""
    before = None
    for one in turns:
        if before not in MAY_FOLLOW[one["role"]]:
            place = f"after {before}" if before else "comes first"
            raise RowError(f"turns out of order: {one['role']} {place}")
        before = one["role"]
    if before != "assistant":
        raise RowError(f"the last turn is the {before}'s; it has to be the assistant's")
    if not any(one["train"] for one in turns if one["role"] == "assistant"):
        raise RowError("every assistant turn has weight 0, so nothing can be learned")
