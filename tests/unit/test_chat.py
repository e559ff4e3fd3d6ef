"""Conversations to text: which turns, how they are rendered, and where answers stand."""

import json

import pytest

from chats import family, row, talk, turn
from finetune.chat import (
    Conversation,
    TemplateError,
    conversation,
    prompt_text,
    render,
    with_system,
)
from finetune.examples import encode_conversation
from finetune.spans import render_conversations


def turns(*contents, system=None):
    rows = talk(*contents, system=system)
    return [{"role": one["role"], "content": one["content"]} for one in rows]


@pytest.fixture
def chatml():
    return family("chatml")


# Which turns


def test_a_row_is_cut_after_the_last_turn_that_is_trained_on():
    prepared = row([*talk("on", "yes", "off"), turn("assistant", "no", weight=0)])
    found = conversation(prepared, None, "completions")
    assert found == Conversation(turns("on", "yes"), "[]", learned=(1,))
    assert conversation(prepared, None, "last-turn") == found


def test_a_row_that_is_trained_on_whole_is_not_cut():
    prepared = row([*talk("on", "yes", "off"), turn("assistant", "no", weight=0)])
    found = conversation(prepared, None, "all")
    assert found == Conversation(turns("on", "yes", "off", "no"), "[]", learned=(1,))


def test_places_of_turns_count_the_system_prompt():
    prepared = row(talk("on", "yes", "off", "no"))
    assert conversation(prepared, "Be short.", "completions").learned == (2, 4)
    assert conversation(prepared, "Be short.", "last-turn").learned == (4,)
    own = row(talk("on", "yes", "off", "no", system="Be long."))
    assert conversation(own, "Be short.", "completions").learned == (2, 4)


def test_what_templates_read_of_a_turn_is_passed_on():
    call = {"type": "function", "function": {"name": "set", "arguments": {"to": [1, {"a": None}]}}}
    prepared = row(
        [
            turn("user", "on", name="Ann"),
            turn("assistant", "", tool_calls=[call], reasoning_content="one"),
        ],
        tools=json.dumps([call]),
    )
    found = conversation(prepared, None, "completions")
    assert found.messages == [
        {"role": "user", "content": "on", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "one"},
    ]
    assert json.loads(found.tools) == [call]


def test_the_system_prompt_is_added_only_where_a_row_has_none():
    messages = turns("on", "yes")
    system = {"role": "system", "content": "Be short."}
    assert with_system(messages, "Be short.") == [system, *messages]
    own = turns("on", "yes", system="Be long.")
    assert with_system(own, "Be short.") == own
    assert with_system(messages, None) == messages
    assert messages == turns("on", "yes")  # the row itself stays as it is
    # an empty prompt is a prompt: it keeps a template from writing its default one
    assert with_system(messages, "")[0] == {"role": "system", "content": ""}


# Rendering


def test_texts_come_back_by_conversation_turns_and_header(chatml):
    """Rows of all kinds are rendered in few calls, and each gets its own text."""
    chatml.chat_template = (
        "{{ tools | length if tools else 0 }}:{% for m in messages %}{{ m.content }};{% endfor %}"
        "{{ '>' if add_generation_prompt }}"
    )
    one, two = (Conversation(turns(*"ab")), Conversation(turns(*"abcd"), '[{"name": "x"}]'))
    like_one = Conversation(turns(*"ef"))
    jobs = [(two, 3, True), (one, 1, True), (two, 4, False), (like_one, 1, True), (one, 2, False)]
    assert render(chatml, jobs, {}) == {
        (id(two), 3, True): "1:a;b;c;>",
        (id(two), 4, False): "1:a;b;c;d;",
        (id(one), 1, True): "0:a;>",
        (id(one), 2, False): "0:a;b;",
        (id(like_one), 1, True): "0:e;>",
    }


def test_nothing_to_render(chatml):
    assert render(chatml, [], {}) == {}
    assert render_conversations(chatml, [], "completions", {}) == []


def test_template_options_reach_the_template(chatml):
    chatml.chat_template = "{{ mood }}"
    job = (Conversation(turns("on")), 1, False)
    assert list(render(chatml, [job], {"mood": "good"}).values()) == ["good"]


def test_the_prompt_is_what_comes_before_the_last_turn(chatml):
    text = prompt_text(chatml, Conversation(turns("on", "yes", "off", "no")), {})
    assert text.endswith("<|im_start|>user\noff<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{% for m in messages %}{{ m.content }}", "Unexpected end of template"),
        ("{{ raise_exception('Not me') }}", "Not me"),
        ("{{ messages[0].content.x.y }}", "has no attribute 'x'"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ 'a'.index(messages[0].content) }}", "substring not found"),
        ("{{ '%(x)s' % {} }}", "'x'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion depth"),
    ],
)
def test_whatever_a_template_raises_ends_in_one_clear_line(chatml, template, cause):
    chatml.chat_template = template
    with pytest.raises(TemplateError) as error:
        encode_conversation(chatml, turns("on", "yes"))
    assert str(error.value).startswith("the chat template refuses a row with the turns user: ")
    assert cause in str(error.value)


def test_the_turns_that_are_named_are_those_that_are_refused(chatml):
    chatml.chat_template = "{{ 1 / (messages[0].content != 'off') }}"
    talks = [Conversation(turns("on", "yes"), learned=(1,))] * 2
    talks.append(Conversation(turns("on", "yes", system="off"), learned=(2,)))
    with pytest.raises(TemplateError, match="with the turns system, user: division"):
        render_conversations(chatml, talks, "completions", {})


def test_several_templates_without_a_default_are_named(chatml):
    chatml.chat_template = {"rag": "a", "tool_use": "b"}
    with pytest.raises(TemplateError, match=r"no default .*\['rag', 'tool_use'\]"):
        encode_conversation(chatml, turns("on", "yes"))
