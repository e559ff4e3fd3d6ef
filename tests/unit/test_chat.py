"""Masks by position, for chat templates in the style of each model family."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from finetune.chat import Conversation, TemplateError, prompt_text, with_system
from finetune.encoding import IGNORED, end_tokens
from finetune.examples import encode_conversation
from project import tiny_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
FAMILIES = {
    # template, BOS, EOS, end marker of a turn
    "chatml": (CHATML, None, "<|im_end|>", "<|im_end|>"),
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
    "gemma": (GEMMA, "<bos>", "<eos>", "<end_of_turn>"),
    "mistral": (MISTRAL, "<s>", "</s>", "</s>"),
}
MARKERS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>"),
    *("[INST]", "[/INST]"),
)


def build(template, bos, eos):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS])
    tokenizer.bos_token, tokenizer.eos_token = bos, eos
    tokenizer.chat_template = template
    if bos is not None:  # plain text gets one, as with the released tokenizers
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
        assert tokenizer("on")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """(tokenizer, end marker) of each family."""
    template, bos, eos, end = FAMILIES[request.param]
    return build(template, bos, eos), end


@pytest.fixture
def chatml():
    return build(*FAMILIES["chatml"][:3])


def turns(*contents, system=None):
    roles = ("user", "assistant") * len(contents)
    rows = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return rows if system is None else [{"role": "system", "content": system}, *rows]


def encode(tokenizer, messages, **options):
    """The only example of a conversation."""
    [example] = encode_conversation(tokenizer, messages, **options)
    return example


def pieces(tokenizer, example):
    """Runs of supervised and of masked text, in order: [(is supervised, text)]."""
    runs: list = []
    for token, label in zip(example.input_ids, example.labels, strict=True):
        assert label in (token, IGNORED)
        if not runs or runs[-1][0] != (label != IGNORED):
            runs.append((label != IGNORED, []))
        runs[-1][1].append(token)
    return [(kept, tokenizer.decode(ids)) for kept, ids in runs]


def trained_on(tokenizer, example):
    return [text for kept, text in pieces(tokenizer, example) if kept]


EXPECTED = {
    "chatml": [
        "<|im_start|>user\nturn on<|im_end|>\n<|im_start|>assistant\n",
        "yes<|im_end|>",
        "\n<|im_start|>user\noff<|im_end|>\n<|im_start|>assistant\n",
        "no one<|im_end|>",
    ],
    "llama3": [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nturn on<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "yes<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\noff<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "no one<|eot_id|>",
    ],
    "gemma": [
        "<bos><start_of_turn>user\nturn on<end_of_turn>\n<start_of_turn>model\n",
        "yes<end_of_turn>",
        "\n<start_of_turn>user\noff<end_of_turn>\n<start_of_turn>model\n",
        "no one<end_of_turn>",
    ],
    "mistral": [
        "<s>[INST] turn on [/INST]",
        " yes</s>",
        "[INST] off [/INST]",
        " no one</s>",
    ],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_assistant_turn_is_supervised_with_its_end_and_nothing_else(name):
    tokenizer = build(*FAMILIES[name][:3])
    example = encode(tokenizer, turns("turn on", "yes", "off", "no one"))
    kept = [False, True, False, True]
    assert pieces(tokenizer, example) == list(zip(kept, EXPECTED[name], strict=True))


@pytest.mark.parametrize("name", EXPECTED)
def test_one_turn_is_what_a_server_sends_then_what_it_gets_back(name):
    """The masked ids are those of the rendered prompt, so training and serving agree."""
    tokenizer = build(*FAMILIES[name][:3])
    example = encode(tokenizer, turns("turn on the light", "yes"))
    prompt = prompt_text(tokenizer, Conversation(turns("turn on the light", "yes")), {})
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert example.input_ids[: len(ids)] == ids
    assert example.labels == [IGNORED] * len(ids) + example.input_ids[len(ids) :]


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_a_system_turn_is_never_supervised(name):
    tokenizer = build(*FAMILIES[name][:3])
    example = encode(tokenizer, turns("on", "yes", system="no one"))
    assert trained_on(tokenizer, example) == ["yes" + FAMILIES[name][3]]
    assert "no one" in tokenizer.decode(example.input_ids)


def test_masks_come_from_positions_not_from_ids(chatml):
    """The answer repeats the question, and the user's text is an answer elsewhere."""
    example = encode(chatml, turns("yes", "yes", "yes", "no", "no", "yes"))
    yes = chatml("yes")["input_ids"][0]
    labels = [label for i, label in zip(example.input_ids, example.labels, strict=True) if i == yes]
    assert labels == [IGNORED, yes, IGNORED, yes]
    assert trained_on(chatml, example) == ["yes<|im_end|>", "no<|im_end|>", "yes<|im_end|>"]


def test_pad_that_equals_eos_changes_nothing(family):
    tokenizer, _ = family
    row = turns("turn on", "yes", "off", "no one")
    before = encode(tokenizer, row)
    pad, tokenizer.pad_token = tokenizer.pad_token, tokenizer.eos_token
    after = encode(tokenizer, row)
    tokenizer.pad_token = pad
    assert after == before
    assert after.labels[-1] == after.input_ids[-1] != IGNORED


@pytest.mark.parametrize("name", ["llama3", "gemma", "mistral"])
def test_one_bos(name):
    tokenizer = build(*FAMILIES[name][:3])
    ids = encode(tokenizer, turns("turn on", "yes", "off", "no")).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_template_that_writes_bos_twice_is_refused():
    tokenizer = build("{{ bos_token }}" + LLAMA3, *FAMILIES["llama3"][1:3])
    with pytest.raises(TemplateError, match="writes BOS twice; remove one from the template"):
        encode(tokenizer, turns("on", "yes"))


def test_no_bos_token_is_no_double_bos(chatml):
    assert chatml.bos_token_id is None
    assert trained_on(chatml, encode(chatml, turns("on", "yes"))) == ["yes<|im_end|>"]


BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_eos_is_added_and_supervised_where_the_template_has_none():
    tokenizer = build(BARE, None, "</s>")
    example = encode(tokenizer, turns("turn on", "yes"))
    assert pieces(tokenizer, example) == [
        (False, "user: turn on\nassistant:"),
        (True, " yes</s>"),
    ]
    assert example.labels[-1] == tokenizer.eos_token_id


def test_eos_is_not_added_after_another_end_marker():
    tokenizer = build(*FAMILIES["gemma"][:3])
    example = encode(tokenizer, turns("on", "yes"))
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
    example = encode(tokenizer, turns("a", "b ☃"))
    assert example.labels[-3:] == [3, 0, 1]


def test_a_header_that_melts_into_the_answer_costs_no_token():
    """`assistant: ` + `yes` is one token ` yes` in one piece of text. A server tokenizes the
    prompt alone, so training has to see the same boundary."""
    template = BARE.replace("assistant:{%", "assistant: {%")
    tokenizer = build(template, None, "</s>")
    whole = tokenizer("assistant: yes")["input_ids"]
    prompt = tokenizer("assistant: ")["input_ids"]
    assert whole[: len(prompt)] != prompt
    example = encode(tokenizer, turns("on", "yes one", "off", "no"))
    # no end marker after the first answer: this template writes none
    assert pieces(tokenizer, example) == [
        (False, "user: on\nassistant: "),
        (True, "yes one"),
        (False, "\nuser: off\nassistant: "),
        (True, "no</s>"),
    ]


def test_an_answer_that_starts_with_a_line_break_keeps_it():
    """As in Qwen's vocabulary: two line breaks are one token."""
    core = Tokenizer(models.BPE({"Ċ": 0, "ĊĊ": 1, "a": 2, "b": 3}, [("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert tokenizer("a\n\nb")["input_ids"] == [2, 1, 3]
    example = encode(tokenizer, turns("a", "\nb"))
    assert example.input_ids == [2, 0, 0, 3, tokenizer.eos_token_id]
    assert example.labels == [IGNORED, IGNORED, 0, 3, tokenizer.eos_token_id]


def test_a_tokenizer_that_marks_spaces_gives_the_same_mask():
    """SentencePiece style, with a space mark before the text, as in Llama 2 and Mistral."""
    vocabulary = {p: i for i, p in enumerate(["<s>", "</s>", "▁", "▁yes", "▁on", "[", "]"])}
    vocabulary |= {c: len(vocabulary) + i for i, c in enumerate("INST/yeson")}
    core = Tokenizer(models.BPE(vocabulary, [], fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = MISTRAL
    example = encode(tokenizer, turns("on", "yes", "on", "yes"))
    tokens = tokenizer.convert_ids_to_tokens(example.input_ids)
    kept = [t for t, label in zip(tokens, example.labels, strict=True) if label != IGNORED]
    assert kept == ["▁", "y", "e", "s", "</s>"] * 2


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_strips_thoughts_from_earlier_turns_is_refused(chatml):
    chatml.chat_template = THINKING
    thought = "<think>one</think>yes"
    with pytest.raises(TemplateError, match="rewrites earlier turns") as error:
        encode(chatml, turns("on", thought, "off", "no"))
    assert "set `chat_template: chatml` or `plain` under the model" in str(error.value)
    # one turn is not rewritten, and neither are turns without thoughts
    assert trained_on(chatml, encode(chatml, turns("on", thought))) == [thought + "<|im_end|>"]
    example = encode(chatml, turns("on", "yes", "off", "no"))
    assert trained_on(chatml, example) == ["yes<|im_end|>", "no<|im_end|>"]


def test_a_prompt_with_more_than_a_header_is_refused(chatml):
    """The prompt opens a thought that the rendered answer does not have."""
    chatml.chat_template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    with pytest.raises(TemplateError, match="rewrites earlier turns"):
        encode(chatml, turns("on", "yes"))


def test_a_system_turn_that_the_template_refuses_ends_in_one_clear_line():
    tokenizer = build(*FAMILIES["gemma"][:3])
    with pytest.raises(TemplateError) as error:
        encode(tokenizer, with_system(turns("on", "yes"), "Be short."))
    assert str(error.value) == (
        "the chat template refuses a row with the turns system, user, assistant: "
        "System role not supported. Leave out what it does not know (a system turn, "
        "`system_prompt`), or set another `chat_template`."
    )


def test_a_broken_template_ends_in_one_clear_line(chatml):
    chatml.chat_template = "{% for m in messages %}{{ m.content }}"
    with pytest.raises(TemplateError, match="the chat template refuses a row"):
        encode(chatml, turns("on", "yes"))


def test_the_system_prompt_is_added_only_where_a_row_has_none():
    row = turns("on", "yes")
    assert with_system(row, "Be short.") == [{"role": "system", "content": "Be short."}, *row]
    own = turns("on", "yes", system="Be long.")
    assert with_system(own, "Be short.") == own
    assert with_system(row, None) == row
    assert row == turns("on", "yes")  # the row itself stays as it is
    # an empty prompt is a prompt: it keeps a template from writing its default one
    assert with_system(row, "")[0] == {"role": "system", "content": ""}


content = st.text(min_size=1, max_size=30).filter(
    lambda text: not any(marker in text for marker in ("<", "[")) and text.strip()
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(contents=st.lists(content, min_size=2, max_size=6).filter(lambda c: len(c) % 2 == 0))
def test_supervised_text_is_the_answers_and_their_end_markers(family, contents):
    tokenizer, end = family
    example = encode(tokenizer, turns(*contents))
    lead = " " if tokenizer.chat_template == MISTRAL else ""
    assert trained_on(tokenizer, example) == [lead + answer + end for answer in contents[1::2]]
    assert tokenizer.decode(example.input_ids).endswith(contents[-1] + end)
