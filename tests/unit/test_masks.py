"""What holds for every conversation, template and tokenizer."""

from __future__ import annotations

import functools
from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chats import FAMILIES, SPACE_EATERS, encoded, family, row, runs, taught, turn
from finetune.chat import conversation
from finetune.encoding import IGNORED, TextEncoder, tokenize, truncated
from finetune.spans import render_conversations
from kinds import KINDS, kind

few = settings(max_examples=60, derandomize=True, database=None)
more = settings(few, max_examples=200)

EMPTY = "<think>\n\n</think>\n\n"
WRITTEN = {
    # what the template writes for an answer, where it is asked for
    "llama3": lambda text: text.strip() + "<|eot_id|>",
    "qwen3": lambda text: EMPTY + text.lstrip("\n") + "<|im_end|>",
    "gemma3": lambda text: text.strip() + "<end_of_turn>",
    "harmony": lambda text: f"<|channel|>final<|message|>{text}<|return|>",
    "mistral": lambda text: f" {text}</s>",
    "zephyr": lambda text: f"{text}</s>",
    "chatml": lambda text: f"{text}<|im_end|>",
    "plain": lambda text: f"{text}</s>",
}
ONE_TEXT = sorted(set(WRITTEN) - {"qwen3", "harmony"})
"""Families that never rewrite an earlier turn."""

family_of = functools.cache(family)
kind_of = functools.cache(kind)

said = st.one_of(
    st.text(min_size=1, max_size=12),
    st.text("ab \n\t.}é☃🙂", min_size=1, max_size=8),
    st.sampled_from(["yes", " yes", "yes ", "\nyes\n", "turn on\n\n", "}", ".\n"]),
).filter(lambda text: "<" not in text and "[" not in text)


@st.composite
def conversations(draw, system=True):
    """Turns of a prepared row; an assistant turn is the last, and some are trained on."""
    count = draw(st.integers(1, 4))
    weights = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    turns = [turn("system", draw(said))] if system and draw(st.booleans()) else []
    for weight in weights:
        turns += [turn("user", draw(said)), turn("assistant", draw(said), weight=weight)]
    return turns


def without_system(turns):
    return [one for one in turns if one["role"] != "system"]


def learned_turns(turns, train_on):
    """Places of the turns that have to be learned."""
    places = [i for i, t in enumerate(turns) if t["role"] == "assistant" and t["train"]]
    return places[-1:] if train_on == "last-turn" else places


def prompt_of(tokenizer, turns, place):
    """The ids that a server has when it is asked for a turn."""
    messages = [{"role": t["role"], "content": t["content"]} for t in turns[:place]]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def first_taught(example):
    return next(i for i, label in enumerate(example.labels) if label != IGNORED)


@more
@given(
    st.sampled_from(sorted(WRITTEN)), conversations(), st.sampled_from(["completions", "last-turn"])
)
def test_the_learned_answers_and_their_end_markers_each_once_and_nothing_else(
    name, turns, train_on
):
    turns = without_system(turns) if name == "mistral" else turns
    tokenizer = family_of(name)
    examples = encoded(tokenizer, row(turns), train_on)
    texts = [text for example in examples for text in taught(tokenizer, example)]
    learned = learned_turns(turns, train_on)
    assert texts == [WRITTEN[name](turns[place]["content"]) for place in learned]
    assert len(examples) == (1 if name in ONE_TEXT else len(learned))


@more
@given(st.sampled_from(sorted(WRITTEN)), conversations(system=False))
def test_the_ids_before_each_answer_are_those_that_a_server_has(name, turns):
    tokenizer = family_of(name)
    examples = encoded(tokenizer, row(turns))
    before = [
        example.input_ids[:place]
        for example in examples
        for place, label in enumerate(example.labels)
        if label != IGNORED and example.labels[place - 1] == IGNORED
    ]
    assert before == [prompt_of(tokenizer, turns, place) for place in learned_turns(turns, None)]


@more
@given(
    st.sampled_from(sorted(set(FAMILIES) - {"deepseek-r1", "phi3"})),
    conversations(system=False),
    st.sampled_from(["completions", "last-turn", "all"]),
)
def test_the_ids_are_the_text_that_the_template_wrote(name, turns, train_on):
    tokenizer = family_of(name)
    talk = conversation(row(turns), None, train_on)
    if train_on == "all" and name not in (*ONE_TEXT, "bare"):  # a turn of weight 0 is refused
        assume(all(one["train"] for one in turns))
    [rendered] = render_conversations(tokenizer, [talk], train_on, {})
    encoder = TextEncoder(tokenizer)
    examples = list(encoder.encode(rendered.examples))
    for pieces, example in zip(rendered.examples, examples, strict=True):
        text = "".join(text for text, _ in pieces)
        end = "</s>" if name == "bare" else ""
        assert tokenizer.decode(example.input_ids) == text + end
        assert len(example.input_ids) == len(example.labels)


@few
@given(st.sampled_from(ONE_TEXT), conversations(system=False))
def test_all_but_turns_of_weight_0(name, turns):
    tokenizer = family_of(name)
    [example] = encoded(tokenizer, row(turns), train_on="all")
    found = runs(tokenizer, example)
    assert found[0] == (False, tokenizer.decode(example.input_ids[:1]))
    left_out = [t["content"] for t in turns if t["role"] == "assistant" and not t["train"]]
    masked = [text for learned, text in found[1:] if not learned]
    assert masked == [WRITTEN[name](text) for text in left_out]


word = st.text("abcdeo \n", min_size=1, max_size=10).filter(str.strip)


@more
@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from(["zephyr", "plain", "mistral", "gemma3"]),
    st.lists(st.tuples(word, word), min_size=1, max_size=3),
)
def test_every_kind_of_tokenizer_parts_prompts_from_answers(name, template, pairs):
    tokenizer = kind_of(name, FAMILIES[template][0])
    turns = [turn(r, t) for pair in pairs for r, t in zip(("user", "assistant"), pair, strict=True)]
    [example] = encoded(tokenizer, row(turns))
    place = 0
    for index in learned_turns(turns, None):
        prompt = prompt_of(tokenizer, turns, index)
        if template in ("zephyr", "mistral"):  # the ones whose markers this vocabulary has
            assert example.input_ids[: len(prompt)] == prompt
            assert set(example.labels[place : len(prompt)]) == {IGNORED}
            place = example.input_ids.index(tokenizer.eos_token_id, len(prompt)) + 1
            assert example.labels[len(prompt) : place] == example.input_ids[len(prompt) : place]
    first = prompt_of(tokenizer, turns, 1)
    assert example.input_ids[: len(first)] == first
    assert set(example.labels[: len(first)]) == {IGNORED}
    assert first_taught(example) == len(first)


@few
@given(st.lists(st.tuples(said, said), min_size=1, max_size=3))
def test_markers_that_swallow_spaces(pairs):
    """What a server sees is what is trained on, though the text is not."""
    tokenizer = family_of("phi3")
    turns = [turn(r, t) for pair in pairs for r, t in zip(("user", "assistant"), pair, strict=True)]
    *_, last = encoded(tokenizer, row(turns))
    prompt = prompt_of(tokenizer, turns, len(turns) - 1)
    eaters = tokenizer.convert_tokens_to_ids(list(SPACE_EATERS))
    line_break = tokenize(tokenizer, ["\n"])[0]
    assert last.input_ids[: len(prompt)] == prompt
    assert set(last.labels[: len(prompt)]) == {IGNORED}
    assert all([after] != line_break for before, after in pairwise(prompt) if before in eaters)


@few
@given(st.lists(st.integers(10, 99), max_size=30), st.integers(2, 12), st.booleans())
def test_each_token_of_plain_text_but_the_first_is_predicted_once(ids, size, bos):
    encoder = TextEncoder(kind_of("byte-level", bos=bos))
    parts = encoder.parts(ids, size)
    whole = [*([1] if bos else []), *ids, 2]
    assert [x for part in parts for x in part.labels if x != IGNORED] == whole[1:]
    joined = parts[0].input_ids + [x for part in parts[1:] for x in part.input_ids[1:]]
    assert joined == whole
    assert all(len(part.input_ids) == len(part.labels) <= size for part in parts)


@few
@given(conversations(), st.integers(2, 40), st.sampled_from(["start", "end"]))
def test_labels_stay_in_line_however_a_row_is_cut(turns, size, side):
    tokenizer = family_of("llama3")
    [example] = encoded(tokenizer, row(turns))
    cut = truncated(example, size, side, tokenizer.bos_token_id)
    assert len(cut.input_ids) == len(cut.labels) == size
    assert cut.input_ids[0] == tokenizer.bos_token_id
    pairs = list(zip(cut.input_ids, cut.labels, strict=True))
    whole = list(zip(example.input_ids, example.labels, strict=True))
    assert pairs == (whole[:size] if side == "end" else [whole[0], *whole[1 - size :]])
    assert all(label in (token, IGNORED) for token, label in pairs)
