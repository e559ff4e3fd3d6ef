"""Text to ids and labels, with tokenizers of every kind."""

from itertools import pairwise

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chats import FAMILIES, encoded, family, marked, row, runs, talk, turn
from finetune.chat import TemplateError
from finetune.encoding import IGNORED, Example, TextEncoder, end_tokens, tokenize, truncated
from kinds import KINDS, kind

CLEAN = {"byte-level", "trimmed offsets", "composed letters", "word piece"}
BARE = FAMILIES["bare"][0]


@pytest.fixture(scope="module", params=KINDS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return kind(name)


def test_which_tokenizers_can_take_pieces_one_by_one(name, tokenizer):
    assert TextEncoder(tokenizer).joins == (name in CLEAN)


@pytest.mark.parametrize("options", [{"lstrip": True}, {"single_word": True}])
def test_any_token_that_looks_beside_itself_needs_care(options):
    tokenizer = kind("byte-level")
    tokenizer.add_tokens([AddedToken("<x>", special=True, normalized=False, **options)])
    assert not TextEncoder(tokenizer).joins


def server(tokenizer, messages):
    """The ids of a prompt, as a server has them."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_each_answer_follows_the_ids_of_its_prompt(name, tokenizer):
    """With care or without it."""
    contents = ("turn on", "yes one", "  off\n", "no", "what", "two")
    [example] = encoded(tokenizer, row(talk(*contents)))
    messages = [{"role": t["role"], "content": t["content"]} for t in talk(*contents)]
    starts = []
    for place in (1, 3, 5):
        prompt = server(tokenizer, messages[:place])
        assert example.input_ids[: len(prompt)] == prompt
        starts.append(len(prompt))
    taught = [i for i, label in enumerate(example.labels) if label != IGNORED]
    assert [i for i in taught if i - 1 not in taught] == starts
    ends = [i for i in taught if i + 1 not in taught]
    assert [example.input_ids[i] for i in ends] == [tokenizer.eos_token_id] * 3


@pytest.mark.parametrize("name", ["metaspace first", "prepend", "prefix space"])
def test_a_mark_before_the_text_does_not_part_the_answer_from_its_marker(name):
    tokenizer = kind(name, FAMILIES["mistral"][0])
    [example] = encoded(tokenizer, row(talk("on", "yes", "off", "no")))
    found = [text.split() for learned, text in runs(tokenizer, example) if learned]
    assert found == [["yes</s>"], ["no</s>"]]


def test_a_line_break_that_a_marker_swallows_gives_no_token():
    """As after the <|end|> of Phi: a server never sees one."""
    tokenizer = family("phi3")
    prepared = row([*talk("on", "yes"), *talk("off", "no")])
    *_, last = encoded(tokenizer, prepared)
    text = "<|user|>\non<|end|>\n<|assistant|>\nyes<|end|>\n<|user|>\noff<|end|>\n<|assistant|>\n"
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(prompt) == text.replace("\n", "")
    assert last.input_ids[: len(prompt)] == prompt


@pytest.mark.parametrize("header", ["assistant: ", "assistant:\n"])
def test_a_header_that_melts_into_the_answer_costs_no_token(header):
    """`assistant: ` + `yes` is one token ` yes` in one piece of text. A server tokenizes the
    prompt alone, so training has to see the same boundary."""
    template = BARE.replace("'assistant:'", repr(header)).replace("': '", f"'{header[9:]}'")
    tokenizer = kind("byte-level", template)
    # no end marker after the first answer: this template writes none
    assert marked(tokenizer, encoded(tokenizer, row(talk("on", "yes one", "off", "no")))) == [
        f"user{header[9:]}on\n{header}⟦yes one⟧\nuser{header[9:]}off\n{header}⟦no</s>⟧"
    ]


def test_a_header_that_melts_into_the_answer_where_texts_are_marked():
    tokenizer = kind("prefix space", BARE.replace("'assistant:'", "'assistant: '"))
    [example] = encoded(tokenizer, row(talk("on", "yes", "off", "no")))
    prompt = tokenize(tokenizer, ["user: on\nassistant: "])[0]
    assert tokenize(tokenizer, ["user: on\nassistant: yes"])[0][: len(prompt)] != prompt
    assert example.input_ids[: len(prompt)] == prompt
    # a mark before the answers, which are tokenized alone, and before nothing else
    assert marked(tokenizer, [example]) == [
        " user: on\nassistant: ⟦ yes⟧\nuser: off\nassistant: ⟦ no</s>⟧"
    ]


def test_an_answer_that_starts_with_a_line_break_keeps_it():
    """As in Qwen's vocabulary: two line breaks are one token."""
    core = Tokenizer(models.BPE({"Ċ": 0, "ĊĊ": 1, "a": 2, "b": 3}, [("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    tokenizer.chat_template = FAMILIES["plain"][0]
    assert tokenizer("a\n\nb")["input_ids"] == [2, 1, 3]
    [example] = encoded(tokenizer, row(talk("a", "\nb")))
    assert example == Example([2, 0, 0, 3, 4], [IGNORED, IGNORED, 0, 3, 4])


# Special tokens


@pytest.mark.parametrize("name", ["llama3", "gemma3", "mistral"])
def test_one_bos(name):
    tokenizer = family(name)
    [example] = encoded(tokenizer, row(talk("turn on", "yes", "off", "no")))
    assert example.input_ids[0] == tokenizer.bos_token_id
    assert example.input_ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("name", ["byte-level", "prepend"])
def test_a_template_that_writes_bos_twice_is_refused(name):
    tokenizer = kind(name, "<s>{{ bos_token }}" + FAMILIES["zephyr"][0])
    with pytest.raises(TemplateError, match="writes BOS twice; remove one from the template"):
        encoded(tokenizer, row(talk("on", "yes")))


def test_no_bos_token_is_no_double_bos():
    tokenizer = family("chatml")
    assert tokenizer.bos_token_id is None
    assert TextEncoder(tokenizer).joined([[5, 6]], [True]).input_ids[:2] == [5, 6]


def test_eos_is_not_added_after_another_end_marker():
    tokenizer = family("gemma3")
    [example] = encoded(tokenizer, row(talk("on", "yes")))
    assert tokenizer.decode(example.input_ids[-2:]) == "yes<end_of_turn>"
    assert tokenizer.eos_token_id not in example.input_ids


def test_an_unknown_last_letter_is_no_end_marker():
    words = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3, ":": 4}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="</s>", chat_template=BARE
    )
    assert end_tokens(tokenizer) == {1}
    [example] = encoded(tokenizer, row(talk("a", "b ☃")))
    assert example.labels[-3:] == [3, 0, 1]


def test_eos_that_is_the_unknown_token_too_ends_a_turn():
    """As with GPT-2."""
    tokenizer = kind("byte-level")
    tokenizer.unk_token = tokenizer.eos_token
    assert tokenizer.eos_token_id in end_tokens(tokenizer)


def test_a_changed_tokenizer_is_seen_anew():
    tokenizer = kind("byte-level", bos=True)
    before = TextEncoder(tokenizer)
    tokenizer.eos_token, tokenizer.bos_token = "<|user|>", "</s>"
    after = TextEncoder(tokenizer)
    assert (before.eos, before.bos, before.adds_bos) == (2, 1, True)
    assert (after.eos, after.bos, after.adds_bos) == (tokenizer.eos_token_id, 2, False)


def test_a_last_piece_that_is_masked_gets_eos_masked():
    example = TextEncoder(kind("byte-level")).joined([[7], [8, 9]], [True, False])
    assert example == Example([7, 8, 9, 2], [IGNORED] * 4)


def test_the_first_token_is_never_supervised():
    """Nothing comes before it that it could be predicted from."""
    assert TextEncoder(kind("byte-level")).joined([[7, 8]], [True]).labels == [IGNORED, 8, 2]


@pytest.mark.parametrize("parts", [[], [[]], [[], []]])
def test_a_text_of_nothing_is_eos_and_teaches_nothing(parts):
    example = TextEncoder(kind("byte-level")).joined(parts, [True] * len(parts))
    assert example == Example([2], [IGNORED])


@pytest.mark.parametrize("name", ["byte-level", "prepend"])
def test_pieces_that_give_no_token(name):
    tokenizer = kind(name)
    encoder = TextEncoder(tokenizer)
    [example] = encoder.encode([[("<|user|>", False), ("", True), ("yes", True)]])
    assert tokenizer.decode(example.input_ids).replace(" ", "") == "<|user|>yes</s>"
    assert list(encoder.encode([])) == []


def test_tokenize_gives_ids_as_they_are():
    tokenizer = kind("byte-level", bos=True)
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    plain, special = tokenize(tokenizer, ["a b c d", ""]), tokenize(tokenizer, ["a"], True)
    assert [len(ids) for ids in plain] == [7, 0]
    assert special == [[1, *tokenize(tokenizer, ["a"])[0]]]


# Plain text


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("count", range(1, 9))
def test_text_in_parts_that_share_one_token(bos, count):
    encoder = TextEncoder(kind("byte-level", bos=bos))
    whole = [*([1] if bos else []), *range(10, 10 + count), 2]
    parts = encoder.parts(list(range(10, 10 + count)), size=4)
    assert [token for part in parts for token in part.labels if token != IGNORED] == whole[1:]
    assert [part.labels[0] for part in parts] == [IGNORED] * len(parts)
    assert all(part.input_ids[1:] == part.labels[1:] for part in parts)
    assert all(a.input_ids[-1] == b.input_ids[0] for a, b in pairwise(parts))
    assert all(len(part.input_ids) == 4 for part in parts[:-1])
    assert 2 <= len(parts[-1].input_ids) <= 4


# Truncation

LONG = Example([1, 5, 6, 7, 8], [IGNORED, IGNORED, 6, IGNORED, 8])


def test_cut_at_the_end():
    assert truncated(LONG, 3, "end", bos=1) == Example([1, 5, 6], [IGNORED, IGNORED, 6])


def test_cut_at_the_start_keeps_bos():
    assert truncated(LONG, 3, "start", bos=1) == Example([1, 7, 8], [IGNORED, IGNORED, 8])
    assert truncated(LONG, 4, "start", bos=1) == Example([1, 6, 7, 8], [IGNORED, 6, IGNORED, 8])


@pytest.mark.parametrize("bos", [None, 9])
def test_cut_at_the_start_without_bos(bos):
    cut = truncated(LONG, 3, "start", bos)
    assert cut == Example([6, 7, 8], [IGNORED, IGNORED, 8])  # 6 has nothing before it now


def test_weight_0_is_masked_by_every_kind(tokenizer):
    prepared = row([turn("user", "on"), turn("assistant", "no", weight=0), *talk("off", "yes")])
    [example] = encoded(tokenizer, prepared)
    taught = [label for label in example.labels if label != IGNORED]
    assert tokenizer.decode(taught).replace(" ", "") == "yes</s>"
