"""What lint.json says of tokens: counts that add up, spreads and samples."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from chats import family, row, talk
from finetune.encoding import IGNORED, Example, TextEncoder
from finetune.examples import Encoder
from finetune.lint import (
    SAMPLE_TOKENS,
    Counts,
    control_tokens,
    describe,
    holds_control_token,
    sample,
    sample_rows,
    spread,
)
from kinds import kind

SETTINGS = {
    "system_prompt": None,
    "train_on": "completions",
    "max_length": 20,
    "truncate": "drop",
    "template_options": {},
}


@pytest.fixture(scope="module")
def encoder():
    """BOS is 1, EOS 2."""
    return TextEncoder(kind("byte-level"))


# Counts


def test_one_example(encoder):
    counts = Counts()
    counts.example(Example([1, 7, 8, 2, 9, 2], [IGNORED, IGNORED, 8, 2, IGNORED, 2]), encoder, True)
    assert list(counts.lengths) == [6]
    assert counts.what == {
        "with_bos": 1,
        "eos_tokens": 2,
        "supervised_tokens": 3,
        "endings": 1,
        "ended": 1,
    }


def test_an_example_that_was_cut_at_its_end_is_no_ending(encoder):
    counts = Counts()
    counts.example(Example([7, 8], [IGNORED, 8]), encoder, ends=False)
    assert (counts.what["endings"], counts.what["ended"], counts.what["with_bos"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("labels", "ended"),
    [
        ([IGNORED, 8, 2], 1),
        ([IGNORED, 2, 8], 0),
        ([IGNORED, 8, IGNORED], 0),
        ([IGNORED, 2, IGNORED], 1),  # what is masked after the marker does not matter
    ],
)
def test_the_last_supervised_token_has_to_be_a_marker(encoder, labels, ended):
    counts = Counts()
    counts.example(Example([7, 8, 2], labels), encoder, ends=True)
    assert counts.what["ended"] == ended


def test_counts_of_parts_add_up():
    rows = [row(talk("turn on" * n, "yes " * (n % 5)), place=f"a:{n}") for n in range(1, 9)]
    rows += [row(text="on off " * n) for n in (1, 30)]
    whole = Encoder(family("chatml"), SETTINGS)
    whole.encode(rows)
    total = Counts()
    for one in rows:
        part = Encoder(family("chatml"), SETTINGS)
        part.encode([one])
        total.add(part.counts)
    assert describe(total) == describe(whole.counts)
    assert sorted(total.lengths) == sorted(whole.counts.lengths)
    assert total.what["too_long"] > 0


def test_labels_add_up():
    one, two = Counts(), Counts()
    one.labels.update("ab")
    two.labels.update("bc")
    one.add(two)
    assert one.labels == {"a": 1, "b": 2, "c": 1}
    one.add(Counts(most_supervised=7))
    one.add(Counts(most_supervised=5))
    assert one.most_supervised == 7


def test_the_section_on_a_split(encoder):
    counts = Counts(lengths=[3, 4], uncut=[3, 4, 90], most_supervised=3)
    counts.what.update(rows=5, too_long=1, unsupervised=2, supervised_tokens=4, truncated=1)
    counts.what.update(rewritten=6, empty_thoughts=7, control_tokens=8, with_bos=9, eos_tokens=10)
    counts.what.update(endings=11, ended=12)
    assert describe(counts) == {
        "rows": 5,
        "examples": 2,
        "sequences": 2,
        "tokens": 7,
        "longest": 4,
        "most_supervised": 3,
        "dropped": {"too_long": 1, "unsupervised": 2},
        "supervised_tokens": 4,
        "truncated": 1,
        "rewritten": 6,
        "empty_thoughts": 7,
        "control_tokens": 8,
        "with_bos": 9,
        "eos_tokens": 10,
        "endings": 11,
        "ended": 12,
        **spread(np.array([3, 4, 90])),
    }


def test_the_section_on_a_split_without_rows():
    section = describe(Counts())
    assert section.pop("quantiles") == {"p50": 0, "p90": 0, "p99": 0}
    assert section.pop("histogram") == {"edges": [], "counts": []}
    assert section.pop("dropped") == {"too_long": 0, "unsupervised": 0}
    assert set(section.values()) == {0}


# Lengths


def test_quantiles_are_lengths_that_occur():
    assert spread(np.arange(1, 101))["quantiles"] == {"p50": 51, "p90": 91, "p99": 100}
    assert spread(np.array([5]))["quantiles"] == {"p50": 5, "p90": 5, "p99": 5}
    assert spread(np.array([1, 1, 1, 9]))["quantiles"] == {"p50": 1, "p90": 9, "p99": 9}


def test_a_histogram_has_bins_of_whole_tokens():
    assert spread(np.array([1, 2, 2, 3]))["histogram"] == {
        "edges": [0, 1, 2, 3],
        "counts": [0, 1, 3],
    }
    wide = spread(np.array([0, 49, 50, 1000]))["histogram"]
    assert wide["edges"] == list(range(0, 1001, 50))
    assert wide["counts"] == [2, 1, *[0] * 17, 1]


@settings(max_examples=100, derandomize=True, database=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40))
def test_a_histogram_counts_each_length_once(lengths):
    found = spread(np.array(lengths))
    edges, counts = found["histogram"]["edges"], found["histogram"]["counts"]
    assert sum(counts) == len(lengths)
    assert edges == sorted(set(edges))
    assert edges[0] == 0
    assert edges[-1] >= max(lengths)
    assert len(edges) == len(counts) + 1 <= 21
    assert counts == [
        sum(a <= n < b or (b == edges[-1] and n == b) for n in lengths) for a, b in pairwise(edges)
    ]
    assert all(type(value) is int for value in (*edges, *counts, *found["quantiles"].values()))


# Samples


def test_samples_are_of_all_lengths():
    assert sample_rows([30, 10, 20, 50, 40], 3) == [1, 0, 3]
    assert sample_rows([30, 10], 5) == [1, 0]
    assert sample_rows([30, 10], 1) == [1]
    assert sample_rows([], 5) == []
    assert sample_rows([7] * 100, 2) == [0, 99]


def test_a_sample_shows_what_is_trained_on(encoder):
    tokenizer = encoder.tokenizer
    [example] = encoder.encode([[("turn on", False), (" yes</s>", True), (" off", False)]])
    tokens = {"id": "a:1", "input_ids": example.input_ids, "labels": example.labels}
    assert sample(tokens, tokenizer, None) == {
        "id": "a:1",
        "pieces": [[False, "turn on"], [True, " yes</s>"], [False, " off</s>"]],
    }


def test_a_sample_of_a_labelled_row_names_its_class(encoder):
    ids = encoder.tokenizer("turn on")["input_ids"]
    assert sample({"id": "c:1", "input_ids": ids, "labels": 1}, encoder.tokenizer, ["a", "b"]) == {
        "id": "c:1",
        "label": "b",
        "pieces": [[False, "turn on"]],
    }


@pytest.mark.parametrize("classes", [None, ["a"]])
def test_a_long_sample_is_cut(encoder, classes):
    ids = encoder.tokenizer("a")["input_ids"] * (SAMPLE_TOKENS + 9)
    labels = 0 if classes else [IGNORED, *ids[1:]]
    pieces = sample({"id": "", "input_ids": ids, "labels": labels}, encoder.tokenizer, classes)
    assert sum(len(text) for _, text in pieces["pieces"]) == SAMPLE_TOKENS


# Control tokens


def test_control_tokens_are_the_special_ones():
    pattern = control_tokens(family("chatml"))
    assert holds_control_token(row(text="a <|im_end|> b"), pattern)
    assert not holds_control_token(row(text="a <|im_end b"), pattern)
    assert holds_control_token(row(talk("a", "b", "<|endoftext|>", "c")), pattern)
    assert not holds_control_token(row(talk("a", "b")), pattern)


def test_control_tokens_are_matched_letter_by_letter():
    """`[UNK]` is no set of letters, and `<s>` is not found in `<small>`."""
    tokenizer = kind("word piece")
    tokenizer.add_special_tokens({"unk_token": "[UNK]"})
    pattern = control_tokens(tokenizer)
    assert not holds_control_token(row(text="UNK or <small>"), pattern)
    assert holds_control_token(row(text="an [UNK]"), pattern)
    assert holds_control_token(row(text="an <s>"), pattern)


def test_tokens_that_are_no_special_ones_are_no_control_tokens():
    tokenizer = kind("byte-level")
    tokenizer.add_tokens(["<think>"])
    assert not holds_control_token(row(text="<think>"), control_tokens(tokenizer))


def test_a_tokenizer_without_special_tokens_has_no_control_tokens():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
    assert not holds_control_token(row(text="a"), control_tokens(tokenizer))
    assert not holds_control_token(row(text=""), control_tokens(tokenizer))
