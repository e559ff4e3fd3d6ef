"""Conversations to text: which turns, how they are rendered, and where answers stand."""

import json

import pytest

from chats import encoded, family, marked, row, talk, taught, turn
from finetune.chat import (
    Answer,
    Conversation,
    TemplateError,
    conversation,
    cut,
    prompt_text,
    render,
    render_conversations,
    with_system,
)
from finetune.examples import encode_conversation


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


# Where answers stand


@pytest.mark.parametrize(
    ("before", "until", "start", "end"),
    [
        ("u:", "u:yes</s>\n", 2, 9),
        ("u:", "u:yes \n\n", 2, 5),
        ("u:\n", "u:\n\n", 3, 3),  # an answer of nothing takes none of its prompt
        ("u:\n", "u:\n", 3, 3),
    ],
)
def test_an_answer_ends_with_its_marker(before, until, start, end):
    answer = Answer(before, until)
    assert (answer.start, answer.end) == (start, end)


def test_pieces_are_the_text_whole_and_once():
    text = "u:\n\nv:no</s>\n"
    spans = [Answer("u:\n", "u:\n\n"), Answer("u:\n\nv:", text)]
    pieces = cut(text, spans)
    assert pieces == [("u:\n", False), ("\nv:", False), ("no</s>", True)]


def test_masks_come_from_positions_not_from_ids(chatml):
    """The answer repeats the question, and the user's text is an answer elsewhere."""
    [example] = encode_conversation(chatml, turns("yes", "yes", "yes", "no", "no", "yes"))
    yes = chatml("yes")["input_ids"][0]
    labels = [label for i, label in zip(example.input_ids, example.labels, strict=True) if i == yes]
    assert labels == [-100, yes, -100, yes]
    assert taught(chatml, example) == ["yes<|im_end|>", "no<|im_end|>", "yes<|im_end|>"]


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "mistral", "phi3", "chatml"])
def test_pad_that_equals_eos_changes_nothing(name):
    tokenizer = family(name)
    messages = turns("turn on", "yes", "off", "no one")
    before = encode_conversation(tokenizer, messages)
    tokenizer.pad_token = tokenizer.eos_token
    after = encode_conversation(tokenizer, messages)
    assert after == before
    assert after[-1].labels[-1] == after[-1].input_ids[-1] != -100


def test_answers_that_a_template_trims_are_trained_on_as_it_writes_them():
    tokenizer = family("gemma3")
    [example] = encode_conversation(tokenizer, turns("turn on", " yes \n", "off", "\nno"))
    assert taught(tokenizer, example) == ["yes<end_of_turn>", "no<end_of_turn>"]


def test_spaces_at_the_end_of_an_answer_stay_before_its_marker(chatml):
    [example] = encode_conversation(chatml, turns("turn on", "yes \n", "off", " "))
    assert taught(chatml, example) == ["yes \n<|im_end|>", " <|im_end|>"]


def test_a_template_that_knows_no_header_lets_the_model_write_it(chatml):
    """A server sends no header either."""
    chatml.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    assert marked(chatml, encoded(chatml, row(talk("on", "yes")))) == [
        "<|user|>on</s>⟦<|assistant|>yes</s>⟧"
    ]


def test_a_template_that_marks_the_last_turn_gives_an_example_for_each(chatml):
    chatml.chat_template = (
        "{% for m in messages %}{{ m.role[0] + ':' + m.content }}{{ '</s>' if loop.last and"
        " m.role == 'assistant' else '\n' }}{% endfor %}{{ 'a:' if add_generation_prompt }}"
    )
    assert marked(chatml, encoded(chatml, row(talk("on", "yes", "off", "no")))) == [
        "u:on\na:⟦yes</s>⟧",
        "u:on\na:yes\nu:off\na:⟦no</s>⟧",
    ]


def test_answers_are_put_together_where_the_text_is_one(chatml):
    """Only the thought of the first is dropped, and the second has none."""
    thought = "<think>one</think>yes"
    tokenizer = family("qwen3")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not"
        " loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    found = marked(tokenizer, encoded(tokenizer, row(talk("on", thought, "off", "no", "a", "b"))))
    assert [text.count("⟦") for text in found] == [1, 2]
    assert f"⟦{thought}<|im_end|>⟧" in found[0]
    assert "⟦no<|im_end|>⟧" in found[1]
    assert "⟦b<|im_end|>⟧" in found[1]


def test_empty_thoughts_are_counted():
    tokenizer = family("qwen3")
    talks = [Conversation(turns("on", "yes", "off", "no"), learned=(1, 3))]
    assert render_conversations(tokenizer, talks, "completions", {})[0].empty_thoughts == 2
    assert render_conversations(tokenizer, talks, "all", {})[0].empty_thoughts == 1


def test_the_empty_thought_of_a_turn_of_weight_0_is_not_trained_on(chatml):
    """As with SmolLM3, whose template writes one before every answer."""
    chatml.chat_template = chatml.chat_template.replace(
        "{{ message.content }}",
        "{{ '<think>\n\n</think>\n' if message.role == 'assistant' }}{{ message.content }}",
    )
    prepared = row([turn("user", "on"), turn("assistant", "yes", weight=0), *talk("off", "no")])
    [text] = marked(chatml, encoded(chatml, prepared, train_on="all"))
    assert text == (
        "<|im_start|>⟦user\non<|im_end|>\n<|im_start|>assistant\n⟧<think>\n\n</think>\nyes"
        "<|im_end|>⟦\n<|im_start|>user\noff<|im_end|>\n<|im_start|>assistant\n⟧<think>\n\n"
        "</think>\n⟦no<|im_end|>⟧"
    )
