"""Evaluation: which rows are answered, what is judged, and what is written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

import evaluate_model
from chats import encoded, family, row, talk, turn
from evaluate_model import evaluate_text, generate, judge, score, summary, write_predictions
from finetune.encoding import IGNORED
from finetune.generation import answer, read_answer
from finetune.modeling import load_for_inference
from finetune.records import SCHEMA
from finetune.thoughts import said
from finetune.tokenizer import load_tokenizer
from scarce import scarce_memory

SETTINGS = {
    **{"max_new_tokens": 4, "batch_size": 2, "rows": None, "metrics": ["exact_match"]},
    **{"system_prompt": None, "template_options": {}, "trust_remote_code": False},
}
CALL = {"type": "function", "function": {"name": "set", "arguments": {"to": 1}}}
CALLS = {
    "harmony": 'to=functions.setcommentary{"to": 1}',
    "qwen3": 'yes<tool_call>\n{"name": "set", "arguments": {"to": 1}}\n</tool_call>',
}


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return load_for_inference(tiny_model, False), load_tokenizer(tiny_model)


def asked(*prompts: str) -> list[dict]:
    return [{"id": f"r{n}", "prompt": p, "reference": f"a{n}"} for n, p in enumerate(prompts)]


def written(folder: Path, *rows: dict) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows), SCHEMA), folder / "test.parquet")
    return folder / "test.parquet"


# which rows


def test_the_last_answer_is_the_reference_and_all_before_it_the_prompt(tmp_path):
    data = written(
        tmp_path,
        row(talk("on", "yes", "off", "no"), place="a:1"),
        row(talk("too long", "yes"), place="a:2"),
        row(None, place="a:3", text="plain text has no answer"),
        row(talk("what", "one"), place="a:4"),
        row(talk("what", "two"), place="a:5"),
    )
    tokenizer, kept = family("chatml"), {"a:1", "a:3", "a:4", "a:5"}
    found = evaluate_model.test_rows(
        data, kept, tokenizer, SETTINGS | {"rows": 2, "system_prompt": "Be short."}
    )
    system = "<|im_start|>system\nBe short.<|im_end|>\n"
    before = "<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    assert found == [
        {
            "id": "a:1",
            "prompt": f"{system}{before}<|im_start|>user\noff<|im_end|>\n<|im_start|>assistant\n",
            "reference": "no",
        },
        {
            "id": "a:4",
            "prompt": f"{system}<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\n",
            "reference": "one",
        },
    ]
    assert [r["id"] for r in evaluate_model.test_rows(data, kept, tokenizer, SETTINGS)] == [
        "a:1",
        "a:4",
        "a:5",
    ]


def test_the_reference_of_a_tool_call_is_what_the_template_writes(tmp_path):
    call = turn("assistant", "", tool_calls=[CALL])
    data = written(tmp_path, row([turn("user", "on"), call], place="a:1"))
    [found] = evaluate_model.test_rows(data, {"a:1"}, family("llama3"), SETTINGS)
    assert found["reference"] == '{"name": "set", "parameters": {"to": 1}}'
    assert found["prompt"].endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


@pytest.mark.parametrize("name", ["harmony", "qwen3"])
@pytest.mark.parametrize("extra", [{}, {"reasoning": "one"}, {"tool_calls": [CALL]}])
def test_what_is_trained_on_is_a_perfect_prediction(name, extra, tmp_path):
    tokenizer = family(name)
    prepared = row([turn("user", "on"), turn("assistant", "yes", **extra)], place="a:1")
    [line] = evaluate_model.test_rows(written(tmp_path, prepared), {"a:1"}, tokenizer, SETTINGS)
    [example] = encoded(tokenizer, prepared)
    ids = [label for label in example.labels if label != IGNORED]
    line["prediction"] = read_answer(ids, {ids[-1]}, tokenizer).text
    assert judge([line], ["exact_match"]) == {"exact_match": 1}
    assert said("", line["reference"]) == ("yes" if "tool_calls" not in extra else CALLS[name])


# answers


def test_prompts_that_fill_the_context_are_left_out_and_counted(loaded):
    lines, facts = generate(*loaded, asked("what", "turn on " * 80, "yes"), SETTINGS)
    assert [(line["id"], line["reference"]) for line in lines] == [("r0", "a0"), ("r2", "a2")]
    assert (facts["generated_rows"], facts["prompts_too_long"]) == (2, 1)
    lines, facts = generate(*loaded, asked("turn on " * 80), SETTINGS)
    assert (lines, facts) == ([], {"generated_rows": 0, "prompts_too_long": 1})


def test_rows_that_memory_does_not_suffice_for_are_scored_in_halves(loaded):
    rows = [[5, 6, 7, 8], [9, 10, 11], [5, 9], [7, 6, 5]]
    tokens = Dataset.from_list(
        [
            {"row": n, "id": f"r{n}", "input_ids": ids, "labels": ids, "length": len(ids)}
            for n, ids in enumerate(rows)
        ]
    )
    settings = SETTINGS | {"batch_size": 4}
    whole = score(*loaded, tokens, settings)
    with scarce_memory(loaded[0], rows=1) as failures:
        assert score(*loaded, tokens, settings) == pytest.approx(whole, rel=1e-3)
    assert failures == [4, 2, 2]


def test_every_row_has_its_own_answer(loaded):
    """Whatever order and batches they are generated in."""
    prompts = ["what", "turn on the light in the kitchen", "yes", "no one is two and"]
    own = [answer(*loaded, [p], max_new_tokens=4, batch_size=1)[0] for p in prompts]
    assert len({a.text for a in own}) == len(prompts)
    lines, facts = generate(*loaded, asked(*prompts), SETTINGS | {"batch_size": 1})
    assert lines == [
        {"id": f"r{n}", "prompt": p, "reference": f"a{n}", "prediction": a.text, "stopped": False}
        for n, (p, a) in enumerate(zip(prompts, own, strict=True))
    ]
    assert (facts["generated_tokens"], facts["stopped_share"]) == (16, 0)


@pytest.mark.parametrize(("prompt", "count"), [("what", 0), ("what\n<think>\n", 1)])
def test_answers_that_end_inside_a_thought_are_counted(loaded, prompt, count):
    """The tiny model closes none."""
    _, facts = generate(*loaded, asked("yes", prompt), SETTINGS)
    assert facts["unfinished_thoughts"] == count


# judgement


def judged(*pairs: tuple[str, str], metrics: tuple[str, ...] = ("exact_match",)) -> dict:
    lines = [{"prompt": "on", "prediction": given, "reference": wanted} for given, wanted in pairs]
    return judge(lines, list(metrics))


THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize("given", ["yes", f"{THOUGHT}yes", "hm\n</think>\n\nyes"])
@pytest.mark.parametrize("wanted", ["yes", f"{THOUGHT}yes", "<think>other</think>yes"])
def test_thoughts_are_not_judged_on_either_side(given, wanted):
    assert judged((given, wanted), (f"{THOUGHT}no", wanted)) == {"exact_match": 0.5}


@pytest.mark.parametrize(
    ("prompt", "given", "thought"),
    [
        ("on", "<think>\nyes", True),
        ("on", "\n<think>", True),
        ("on", f"{THOUGHT}<think>\nyes", True),
        ("on\n<think>\n", "yes", True),
        ("on\n<think>\n", "hm\n</think>\n\nyes", False),
        ("on\n<think>\n\n</think>\n\n", "yes", False),
        ("<think> is a tag. on", "yes", False),
        ("on", "yes", False),
    ],
)
def test_a_thought_that_never_ends_is_no_answer(prompt, given, thought):
    """ROUGE would find the reference in it."""
    line = {"prompt": prompt, "prediction": given, "reference": "yes"}
    scores = judge([line], ["exact_match", "rouge"])
    assert scores == {"exact_match": not thought, "rouge_l": not thought}
    assert (said(prompt, given) is None) is thought


def test_a_tag_within_an_answer_opens_no_thought():
    assert judged(("Write <think>", "Write <think>"), ("a", "")) == {"exact_match": 0.5}
    assert said("on", "Write <think>") == "Write <think>"


def test_each_prediction_is_judged_by_its_own_reference():
    assert judged(("a", "a"), ("b", "b")) == {"exact_match": 1}
    assert judged(("a", "b"), ("b", "a")) == {"exact_match": 0}


def test_all_metrics_that_are_asked_for():
    scores = judged(('{"a": 1}', '{"a": 1.0}'), metrics=("exact_match", "json"))
    assert scores == {"exact_match": 0, "json_valid": 1, "json_equal": 1}


# the whole


@pytest.mark.parametrize("plain", [True, False])
def test_plain_text_has_a_loss_and_no_answers(plain, loaded, tiny_model, tmp_path):
    texts = row(None, place="a:1", text="turn on"), row(talk("on", "yes"), place="a:1")
    ids = loaded[1]("turn on the light")["input_ids"]
    tokens = {"id": ["a:1"], "input_ids": [ids], "labels": [ids], "length": [len(ids)], "row": [0]}
    args = argparse.Namespace(
        model=tiny_model, data=written(tmp_path, texts[not plain]), settings=SETTINGS
    )
    results, lines = evaluate_text(args, Dataset.from_dict(tokens), {})
    assert results["loss"] > 0
    assert len(lines) == results.get("generated_rows", 0) == (0 if plain else 1)
    assert ("exact_match" in results) is not plain


def test_predictions_are_lines_of_json(tmp_path):
    lines = [{"id": "a:1", "prediction": "é\n\u2028"}, {"id": "a:2", "prediction": ""}]
    write_predictions(tmp_path / "predictions.jsonl", lines)
    text = (tmp_path / "predictions.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line) for line in text.split("\n")[:-1]] == lines
    assert "é" in text


def test_the_summary_says_how_many_prompts_got_no_answer():
    scores = {"loss": 1, "exact_match": 0.5, "prompts_too_long": 0}
    assert summary(scores) == "loss 1.0000, exact_match 50.0%"
    text = "loss 1.0000, exact_match 50.0%, 3 prompts fill the context and got no answer"
    assert summary(scores | {"prompts_too_long": 3}) == text


def test_the_summary_says_how_many_answers_ended_inside_a_thought():
    scores = {"loss": 1, "exact_match": 0.5, "unfinished_thoughts": 0}
    assert summary(scores) == "loss 1.0000, exact_match 50.0%"
    assert summary(scores | {"unfinished_thoughts": 3}) == (
        "loss 1.0000, exact_match 50.0%, 3 answers ended inside a thought and count as empty: "
        "raise evaluation.max_new_tokens, or set template_options: {enable_thinking: false}"
    )
