"""Where answers stand in a rendered conversation."""

import pytest

from chats import encoded, family, marked, row, talk, taught, turn
from finetune import spans
from finetune.chat import Conversation, render
from finetune.examples import encode_conversation
from finetune.spans import Answer, cut, render_conversations


def turns(*contents):
    return [{"role": one["role"], "content": one["content"]} for one in talk(*contents)]


@pytest.fixture
def chatml():
    return family("chatml")


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
    answers = [Answer("u:\n", "u:\n\n"), Answer("u:\n\nv:", text)]
    pieces = cut(text, answers)
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


@pytest.mark.parametrize("train_on", ["completions", "all"])
def test_empty_thoughts_that_are_learned_are_counted(train_on):
    talks = [Conversation(turns("on", "yes", "off", "no"), learned=(1, 3))]

    def count(**options):
        [rendered] = render_conversations(family("qwen3"), talks, train_on, options)
        return rendered.empty_thoughts

    assert count() == (2 if train_on == "completions" else 1)
    assert count(enable_thinking=False) == 0


def test_an_empty_thought_that_the_prompt_opens_is_learned_to_its_end_and_counted(chatml):
    """As with Qwen3.5, which thinks by default."""
    chatml.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}"
        "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ m.content }}<|im_end|>"
        "{% endfor %}{{ '<|im_start|>assistant\n<think>\n' if add_generation_prompt }}"
    )
    assert marked(chatml, encoded(chatml, row(talk("on", "yes")))) == [
        "<|im_start|>user\non<|im_end|><|im_start|>assistant\n<think>\n"
        "⟦\n</think>\n\nyes<|im_end|>⟧"
    ]
    talks = [Conversation(turns("on", "yes", "off", "</think> is a tag"), learned=(1, 3))]
    for train_on in ("completions", "all"):
        assert render_conversations(chatml, talks, train_on, {})[0].empty_thoughts == 2


def test_an_empty_thought_after_a_line_break(chatml):
    """A header can end before its line break."""
    chatml.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}"
        "{{ '<think>\n</think>' if m.role == 'assistant' }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    assert marked(chatml, encoded(chatml, row(talk("on", "yes")))) == [
        "<|im_start|>user\non<|im_end|><|im_start|>assistant⟦\n<think>\n</think>yes<|im_end|>⟧"
    ]


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
        "<|im_end|>⟦\n<|im_start|>user\noff<|im_end|>\n<|im_start|>assistant\n<think>\n\n"
        "</think>\nno<|im_end|>⟧"
    )


def test_long_conversations_are_rendered_a_few_at_once(chatml, monkeypatch):
    turns = [("user", "a" * 50), ("assistant", "b" * 50)] * 3
    messages = [{"role": role, "content": content} for role, content in turns]
    talks = [Conversation(messages, learned=(1, 3, 5)) for _ in range(5)]
    together = render_conversations(chatml, talks, "completions", {})
    rendered = []

    def counted(tokenizer, jobs, options):
        jobs = list(jobs)
        rendered.append(len(jobs))
        return render(tokenizer, jobs, options)

    monkeypatch.setattr(spans, "render", counted)
    monkeypatch.setattr(spans, "LETTERS", 2 * 300 * (1 + 3))
    assert render_conversations(chatml, talks, "completions", {}) == together
    assert rendered == [12, 12, 6]  # two texts for each answer
