"""Prepared rows to examples: what is kept, cut and dropped, and how it is counted."""

import json

import pytest
from tokenizers import AddedToken, processors

from chats import family, marked, row, talk, taught, turn
from finetune.chat import TemplateError
from finetune.cli import UserError
from finetune.encoding import IGNORED, Example
from finetune.examples import Encoder, encode_conversation
from kinds import kind

SETTINGS = {
    "system_prompt": None,
    "train_on": "completions",
    "max_length": 100,
    "truncate": "drop",
    "template_options": {},
}
TWO = row(talk("turn on", "yes", "off", "no"), place="a.jsonl:7")
"""26 tokens in ChatML: 12 up to the end of the first answer."""


def make(tokenizer=None, classes=None, **changes):
    return Encoder(tokenizer or family("chatml"), SETTINGS | changes, classes)


def texts(encoder, rows):
    """What comes out, with ⟦ ⟧ around what is trained on."""
    examples = [Example(ids, labels) for _, ids, labels in encoder.encode(rows)]
    return marked(encoder.tokenizer, examples)


def counts(encoder, *names):
    return tuple(encoder.counts.what[name] for name in names)


ON = "<|im_start|>user\nturn on<|im_end|>\n<|im_start|>assistant\n"
OFF = "\n<|im_start|>user\noff<|im_end|>\n<|im_start|>assistant\n"


def test_a_row_becomes_ids_labels_and_its_place():
    encoder = make()
    [(place, ids, labels)] = encoder.encode([TWO])
    assert place == "a.jsonl:7"
    assert len(ids) == len(labels)
    assert marked(encoder.tokenizer, [Example(ids, labels)]) == [
        f"{ON}⟦yes<|im_end|>⟧{OFF}⟦no<|im_end|>⟧"
    ]


def test_settings_of_the_dataset_reach_the_template():
    encoder = make(family("llama3"), system_prompt="Be short.", train_on="last-turn")
    encoder.settings["template_options"] = {"date_string": "1 May 2026"}
    [text] = texts(encoder, [TWO])
    assert "Today Date: 1 May 2026\n\nBe short.<|eot_id|>" in text
    assert text.count("⟦") == 1


def test_no_rows_give_nothing():
    encoder = make()
    assert encoder.encode([]) == []
    assert list(encoder.counts.lengths) == []


def test_a_conversation_of_its_own_gives_all_answers():
    [example] = encode_conversation(
        family("chatml"), [{"role": t["role"], "content": t["content"]} for t in TWO["messages"]]
    )
    assert taught(family("chatml"), example) == ["yes<|im_end|>", "no<|im_end|>"]


# Truncation


def length():
    [(_, ids, _)] = make().encode([TWO])
    return len(ids)


@pytest.mark.parametrize("truncate", ["drop", "start", "end", "error"])
def test_max_length_is_inclusive(truncate):
    encoder = make(max_length=length(), truncate=truncate)
    assert texts(encoder, [TWO]) == texts(make(), [TWO])
    assert counts(encoder, "too_long", "truncated", "ended") == (0, 0, 1)


def test_drop():
    encoder = make(max_length=length() - 1)
    assert texts(encoder, [TWO]) == []
    assert counts(encoder, "rows", "too_long", "unsupervised", "truncated") == (1, 1, 0, 0)
    assert list(encoder.counts.lengths) == []
    assert list(encoder.counts.uncut) == [length()]  # from which max_length can be chosen


def test_cut_at_the_end():
    encoder = make(max_length=length() - 1, truncate="end")
    assert texts(encoder, [TWO]) == [f"{ON}⟦yes<|im_end|>⟧{OFF}⟦no⟧"]
    assert counts(encoder, "too_long", "truncated", "endings", "ended") == (0, 1, 0, 0)
    assert list(encoder.counts.lengths) == [length() - 1]
    assert list(encoder.counts.uncut) == [length()]


def test_cut_at_the_start():
    encoder = make(max_length=length() - 1, truncate="start")
    assert texts(encoder, [TWO]) == [f"{ON[12:]}⟦yes<|im_end|>⟧{OFF}⟦no<|im_end|>⟧"]
    assert counts(encoder, "truncated", "endings", "ended") == (1, 1, 1)


def test_cut_at_the_start_keeps_bos():
    encoder = make(family("mistral"), max_length=4, truncate="start")
    assert texts(encoder, [TWO]) == ["<s>[/INST]⟦ no</s>⟧"]
    assert counts(encoder, "with_bos") == (1,)


UNTAUGHT_END = row([*talk("on", "yes", "off"), turn("assistant", "no no no", weight=0)])


@pytest.mark.parametrize(
    ("prepared", "changes"),
    [
        (TWO, {"truncate": "end", "max_length": 5}),
        (UNTAUGHT_END, {"truncate": "start", "max_length": 3, "train_on": "all"}),
    ],
)
def test_a_row_left_without_anything_to_learn_is_dropped_and_counted(prepared, changes):
    encoder = make(**changes)
    assert texts(encoder, [prepared]) == []
    assert counts(encoder, "unsupervised", "truncated", "too_long") == (1, 0, 0)
    assert list(encoder.counts.lengths) == []
    assert len(encoder.counts.uncut) == 1


def test_error_names_the_row():
    encoder = make(max_length=length() - 1, truncate="error")
    with pytest.raises(UserError) as error:
        encoder.encode([row(talk("on", "yes"), place="a.jsonl:1"), TWO])
    assert str(error.value) == (
        f"a.jsonl:7 has {length()} tokens, more than max_length {length() - 1} (`truncate: "
        "error`). Raise max_length, shorten the row, or choose drop, start or end."
    )


def test_a_rewritten_row_of_which_one_example_is_too_long():
    tokenizer = family("qwen3")
    whole = make(tokenizer)
    first, second = texts(whole, [TWO])
    assert counts(whole, "rewritten", "empty_thoughts", "truncated") == (1, 2, 0)
    encoder = make(tokenizer, max_length=whole.counts.lengths[0])
    assert texts(encoder, [TWO]) == [first]
    assert counts(encoder, "rows", "rewritten", "truncated", "too_long") == (1, 1, 1, 0)
    assert list(encoder.counts.uncut) == list(whole.counts.lengths)
    assert second.count("⟦") == 1


def test_an_answer_that_the_template_does_not_write_is_counted():
    tokenizer = family("bare")
    encoder = make(tokenizer)
    assert texts(encoder, [row([turn("user", "on"), turn("assistant", " ")])]) == []
    assert counts(encoder, "unsupervised", "too_long") == (1, 0)


# Plain text


def test_text_longer_than_max_length_is_cut_into_parts():
    tokenizer = kind("byte-level", bos=True)
    encoder = make(tokenizer, max_length=4)
    out = encoder.encode([row(text="turn on off the light", place="a.txt:3")])
    assert [place for place, *_ in out] == ["a.txt:3"] * 2
    assert [tokenizer.decode(ids) for _, ids, _ in out] == [
        "<s>turn on off",
        " off the light</s>",
    ]
    assert [labels[0] for *_, labels in out] == [IGNORED] * 2
    assert list(encoder.counts.lengths) == list(encoder.counts.uncut) == [4, 4]
    assert counts(encoder, "rows", "truncated", "supervised_tokens") == (1, 0, 6)
    assert counts(encoder, "with_bos", "eos_tokens", "endings", "ended") == (1, 1, 1, 1)


@pytest.mark.parametrize("truncate", ["drop", "start", "end", "error"])
def test_text_is_never_dropped_for_its_length(truncate):
    encoder = make(kind("byte-level"), max_length=2, truncate=truncate)
    assert len(encoder.encode([row(text="turn on off")])) == 3


def test_text_of_which_the_tokenizer_knows_nothing_is_dropped_and_counted():
    encoder = make(kind("stripped", bos=True))
    assert encoder.encode([row(text=" \n"), row(text="on")]) != []
    assert counts(encoder, "rows", "unsupervised") == (2, 1)
    assert len(encoder.counts.lengths) == 1


def test_texts_and_conversations_may_be_mixed():
    encoder = make()
    rows = [row(text="off", place="b.txt:1"), TWO, row(text="on", place="b.txt:2")]
    assert sorted(place for place, *_ in encoder.encode(rows)) == [
        "a.jsonl:7",
        "b.txt:1",
        "b.txt:2",
    ]
    assert counts(encoder, "rows", "endings", "ended") == (3, 3, 3)


def test_texts_need_no_template():
    tokenizer = kind("byte-level")
    tokenizer.chat_template = None
    assert len(make(tokenizer).encode([row(text="on")])) == 1


# Labelled text


@pytest.fixture
def bert():
    """As BERT: [CLS] before a text and [SEP] after it, no EOS and no BOS."""
    tokenizer = kind("word piece")
    tokenizer.add_tokens([AddedToken(t, special=True) for t in ("[CLS]", "[SEP]")])
    cls, sep = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]"])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
    )
    tokenizer.eos_token = tokenizer.bos_token = None
    return tokenizer


CLASSES = {"bad": 0, "good": 1}


def labelled(text, label, place="c.csv:2"):
    return row(text=text, label=label, place=place)


def test_labelled_text_gets_the_tokenizers_own_special_tokens_and_its_class(bert):
    encoder = make(bert, CLASSES)
    out = encoder.encode(
        [labelled("Turn on", "good", "c.csv:2"), labelled("off", "bad", "c.csv:3")]
    )
    assert [(place, bert.decode(ids), label) for place, ids, label in out] == [
        ("c.csv:2", "[CLS] turn on [SEP]", 1),
        ("c.csv:3", "[CLS] off [SEP]", 0),
    ]
    assert encoder.counts.labels == {"good": 1, "bad": 1}
    assert list(encoder.counts.lengths) == list(encoder.counts.uncut) == [4, 3]
    assert counts(encoder, "rows", "supervised_tokens", "endings", "with_bos") == (2, 0, 0, 0)


@pytest.mark.parametrize(
    ("truncate", "kept"), [("end", "[CLS] turn on [SEP]"), ("start", "[CLS] the light [SEP]")]
)
def test_labelled_text_is_cut_between_its_special_tokens(bert, truncate, kept):
    side = bert.truncation_side
    encoder = make(bert, CLASSES, max_length=4, truncate=truncate)
    rows = [labelled("turn on the light", "good"), labelled("on off the", "bad")]
    [(_, ids, label), (_, other, _)] = encoder.encode(rows)
    assert (bert.decode(ids), label, len(other)) == (kept, 1, 4)
    assert counts(encoder, "truncated", "too_long") == (2, 0)
    assert list(encoder.counts.uncut) == [6, 5]
    assert list(encoder.counts.lengths) == [4, 4]
    # the tokenizer is as it was
    assert bert.backend_tokenizer.truncation is None
    assert bert.truncation_side == side
    assert len(bert("turn on the light")["input_ids"]) == 6


@pytest.mark.parametrize("truncate", ["drop", "start", "end", "error"])
def test_max_length_of_labelled_text_is_inclusive(bert, truncate):
    encoder = make(bert, CLASSES, max_length=6, truncate=truncate)
    assert len(encoder.encode([labelled("turn on the light", "good")])) == 1
    assert counts(encoder, "truncated", "too_long") == (0, 0)


def test_labelled_text_that_is_too_long_is_dropped_and_counted(bert):
    encoder = make(bert, CLASSES, max_length=4)
    out = encoder.encode([labelled("turn on the light", "good"), labelled("on", "bad")])
    assert len(out) == 1
    assert counts(encoder, "rows", "too_long", "truncated") == (2, 1, 0)
    assert encoder.counts.labels == {"bad": 1}


def test_labelled_text_that_is_too_long_as_an_error(bert):
    encoder = make(bert, CLASSES, max_length=4, truncate="error")
    with pytest.raises(UserError, match=r"^c\.csv:9 has 6 tokens, more than max_length 4"):
        encoder.encode([labelled("turn on the light", "good", "c.csv:9")])


@pytest.mark.parametrize(("text", "size"), [("\x00", 9), ("turn on", 2)])
def test_labelled_text_of_which_nothing_is_left_is_dropped_and_counted(bert, text, size):
    encoder = make(bert, CLASSES, max_length=size, truncate="end")
    assert encoder.encode([labelled(text, "good")]) == []
    assert counts(encoder, "unsupervised", "truncated") == (1, 0)
    assert list(encoder.counts.lengths) == []


def test_a_tokenizer_without_special_tokens_can_classify_too():
    encoder = make(kind("stripped"), CLASSES)
    out = encoder.encode([labelled(" ", "good"), labelled("on", "bad")])
    assert [label for *_, label in out] == [0]
    assert counts(encoder, "unsupervised") == (1,)


# Control tokens, and errors


def test_rows_whose_own_text_holds_a_control_token_are_counted():
    encoder = make()
    encoder.encode(
        [
            row(talk("turn <|im_end|> on", "yes")),
            row(talk("on", "yes <|im_start|>")),
            row(talk("on", "yes", system="<|im_end|><|im_end|>")),
            row(talk("<|im_end |>", "yes")),
            row(text="<|endoftext|>"),
            row(text="on"),
        ]
    )
    assert counts(encoder, "rows", "control_tokens") == (6, 4)


def test_a_model_without_a_template_is_told_what_to_set():
    tokenizer = family("chatml")
    tokenizer.chat_template = None
    with pytest.raises(UserError) as error:
        make(tokenizer).encode([TWO])
    assert str(error.value) == (
        "this model has no chat template. Set `chat_template: plain` under the model (a base "
        "model: text, newline, answer), or `chatml`, or a Jinja file of your own."
    )


def test_a_row_that_the_template_refuses_is_named():
    rows = [
        row(talk("on", "yes"), place="a.jsonl:1"),
        row(talk("on", "yes", system="Be short."), place="a.jsonl:2"),
        row(talk("on", "yes", system="Be long."), place="a.jsonl:3"),
    ]
    with pytest.raises(TemplateError, match=r"^a\.jsonl:2: the chat template refuses a row with"):
        make(family("mistral")).encode(rows)


def test_a_row_whose_answer_cannot_be_told_apart_is_named():
    with pytest.raises(TemplateError, match=r"^a\.jsonl:7: the chat template opens an answer"):
        make(family("deepseek-r1")).encode([TWO])


def test_a_row_whose_tool_call_would_be_lost_is_named():
    call = {"type": "function", "function": {"name": "set", "arguments": {}}}
    lost = row([turn("user", "on"), turn("assistant", "", tool_calls=[call])], place="a.jsonl:4")
    with pytest.raises(TemplateError, match=r"^a\.jsonl:4: .*leaves out the tool calls"):
        make().encode([TWO, lost])


def test_many_tools_and_rows_keep_their_own():
    """Rows are rendered together with others of the same tools."""
    tokenizer = family("qwen3")
    rows = [
        row(
            talk(f"ask {i}", f"say {i}"),
            place=f"a.jsonl:{i}",
            tools=json.dumps([{"type": "function", "function": {"name": f"tool{i % 3}"}}]),
        )
        for i in range(7)
    ]
    for i, text in enumerate(texts(make(tokenizer), rows)):
        assert f'"tool{i % 3}"' in text
        assert f"ask {i}" in text
        assert f"⟦say {i}<|im_end|>⟧" in text
