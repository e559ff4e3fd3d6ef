"""Evaluation: which rows are answered, what is judged, and what is written."""

from __future__ import annotations

import pytest

from evaluate_model import generate, summary
from finetune.modeling import load_for_inference
from finetune.tokenizer import load_tokenizer

SETTINGS = {"max_new_tokens": 4, "batch_size": 8}


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return load_for_inference(tiny_model, False), load_tokenizer(tiny_model)


def asked(*prompts: str) -> list[dict]:
    return [{"id": f"r{n}", "prompt": p, "reference": f"a{n}"} for n, p in enumerate(prompts)]


def test_prompts_that_fill_the_context_are_left_out_and_counted(loaded):
    lines, facts = generate(*loaded, asked("what", "turn on " * 80, "yes"), SETTINGS)
    assert [(line["id"], line["reference"]) for line in lines] == [("r0", "a0"), ("r2", "a2")]
    assert (facts["generated_rows"], facts["prompts_too_long"]) == (2, 1)
    lines, facts = generate(*loaded, asked("turn on " * 80), SETTINGS)
    assert (lines, facts) == ([], {"generated_rows": 0, "prompts_too_long": 1})


def test_the_summary_says_how_many_prompts_got_no_answer():
    scores = {"loss": 1, "exact_match": 0.5, "prompts_too_long": 0}
    assert summary(scores) == "loss 1.0000, exact_match 50.0%"
    text = "loss 1.0000, exact_match 50.0%, 3 prompts fill the context and got no answer"
    assert summary(scores | {"prompts_too_long": 3}) == text
