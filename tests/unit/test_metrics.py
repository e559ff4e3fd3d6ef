"""Local `evaluate` modules: exact values, odd inputs, and no word to the hub."""

import json
import math

import evaluate
import pytest
from rouge_score.rouge_scorer import RougeScorer

from evaluate_model import METRICS, load_metric


def compute(name, pairs):
    guesses, references = zip(*pairs, strict=True)
    return load_metric(name).compute(predictions=guesses, references=references)


@pytest.mark.parametrize("name", ["classification", "exact_match", "json", "rouge", "token_scores"])
def test_each_module_loads_from_its_folder(name):
    """The hub has an exact_match and a rouge of its own: ours is what is loaded."""
    module = evaluate.load(str(METRICS / name), experiment_id=f"test-{name}")
    text = (METRICS / name / f"{name}.py").read_text()
    assert module.name == name
    assert text.startswith(f'"""{module.description}"""')


def test_exact_match_ignores_white_space_at_the_ends_alone():
    pairs = [("on", "on"), (" on\n", "on"), ("On", "on"), ("o n", "on"), ("", "on")]
    assert compute("exact_match", pairs) == {"exact_match": 2 / 5}


def test_json_counts_valid_and_equal_apart():
    pairs = [
        ('{"a": 1, "b": [1, 2]}', '{"b": [1, 2], "a": 1}'),  # the order of keys is free
        ('{"a": 1, "b": [2, 1]}', '{"a": 1, "b": [1, 2]}'),  # the order of a list is not
        ("not json", '{"a": 1}'),
        ('{"a": 1', '{"a": 1}'),
    ]
    assert compute("json", pairs) == {"json_valid": 2 / 4, "json_equal": 1 / 4}


BOTH, VALID, NEITHER = (1.0, 1.0), (1.0, 0.0), (0.0, 0.0)


@pytest.mark.parametrize(
    ("guess", "reference", "expected"),
    [
        ('{"a": {"b": [{"c": null}]}}', '{"a":{"b":[{"c":null}]}}', BOTH),
        ('{"a": {"b": [{"c": 0}]}}', '{"a": {"b": [{"c": null}]}}', VALID),
        (" [] \n", "[]", BOTH),
        ('"ä"', r'"\u00e4"', BOTH),
        ("1.0", "1", BOTH),
        ("1e2", "100", BOTH),
        ('{"on": true}', '{"on": 1}', VALID),  # Python holds True == 1
        ('{"on": false}', '{"on": 0}', VALID),
        ('{"on": "1"}', '{"on": 1}', VALID),
        ("", '{"a": 1}', NEITHER),
        ("", "", NEITHER),
        ("plain", "plain", NEITHER),
        ("NaN", "NaN", NEITHER),  # Python's own reader takes these three
        ('{"a": Infinity}', '{"a": Infinity}', NEITHER),
        ('{"a": -Infinity}', '{"a": 1}', NEITHER),
        ("{'a': 1}", '{"a": 1}', NEITHER),
        ('{"a": 1} and more', '{"a": 1}', NEITHER),
        ("1" * 5000, "1", VALID),  # Python refuses to make an int of more than 4,300 digits
        ("[" * 100_000, "[]", NEITHER),
    ],
)
def test_odd_json(guess, reference, expected):
    scores = compute("json", [(guess, reference)])
    assert (scores["json_valid"], scores["json_equal"]) == expected


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence():
    # 3 words in common, of 4 and of 5: F1 = 2 * (3/4) * (3/5) / (3/4 + 3/5)
    pairs = [("the light is on", "the big light was on"), ("no", "yes"), ("Yes!", "yes")]
    expected = (2 * 0.75 * 0.6 / 1.35 + 0 + 1) / 3
    assert compute("rouge", pairs) == {"rouge_l": pytest.approx(expected, abs=1e-12)}


def test_rouge_l_of_english_is_googles():
    pairs = [
        ("The cat_sat on 2 mats.", "a cat sat; on two MATS"),
        ('{"intent": "HassTurnOn", "area": "attic"}', '{"intent": "HassTurnOff"}'),
        ("it's", "its"),
    ]
    google = RougeScorer(["rougeL"])
    expected = [google.score(r, g)["rougeL"].fmeasure for g, r in pairs]
    assert compute("rouge", pairs)["rouge_l"] == pytest.approx(sum(expected) / 3, abs=1e-12)


@pytest.mark.parametrize("text", ["打开 厨房 的 灯", "включи свет", "φώτα", "été"])
def test_rouge_l_reads_every_script(text):
    assert compute("rouge", [(text, text)]) == {"rouge_l": 1.0}
    assert compute("rouge", [("x", text)]) == {"rouge_l": 0.0}


@pytest.mark.parametrize("guess", ["", " ", "…", "?!"])
def test_rouge_l_of_no_words_is_zero(guess):
    assert compute("rouge", [(guess, "yes")]) == {"rouge_l": 0.0}


def test_token_scores_are_weighed_by_tokens_not_by_rows_or_batches():
    rows = [(1.0, 1, 1), (30.0, 10, 4), (0.5, 4, 4)]
    expected = {
        "loss": pytest.approx(31.5 / 15, abs=1e-12),
        "perplexity": pytest.approx(math.exp(31.5 / 15), rel=1e-12),
        "token_accuracy": pytest.approx(9 / 15, abs=1e-12),
    }
    for size in (1, 2, 3):
        metric = load_metric("token_scores")
        for start in range(0, 3, size):
            nll, tokens, correct = zip(*rows[start : start + size], strict=True)
            metric.add_batch(nll=nll, tokens=tokens, correct=correct)
        assert metric.compute() == expected


def test_a_huge_loss_has_a_finite_perplexity():
    metric = load_metric("token_scores")
    metric.add_batch(nll=[9999.0], tokens=[1], correct=[0])
    scores = metric.compute()
    assert scores["loss"] == 9999.0
    assert json.loads(json.dumps(scores, allow_nan=False))["perplexity"] == math.exp(700)


def classify(predictions, references, labels, nll=None):
    metric = load_metric("classification")
    given = {"predictions": predictions, "references": references}
    nll = [0.0] * len(references) if nll is None else nll
    return metric.compute(**given, nll=nll, labels=labels)


def test_classification_by_hand():
    """Class a: 3 rows, of which 1 is found, and 1 of c taken for it. Class b: 1 row, found. Class
    c: 2 rows, of which 1 is found, and 2 of a taken for it. Class d: nowhere."""
    scores = classify(
        predictions=[0, 2, 2, 1, 0, 2],
        references=[0, 0, 0, 1, 2, 2],
        labels=["a", "b", "c", "d"],
        nll=[0.1, 0.2, 1.2, 0.3, 2.0, 0.4],
    )
    assert scores["loss"] == pytest.approx(4.2 / 6)
    assert scores["accuracy"] == pytest.approx(3 / 6)
    assert scores["confusion_matrix"] == {
        "labels": ["a", "b", "c", "d"],
        "counts": [[1, 0, 2, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]],
    }
    per_class = {
        "a": {"precision": 1 / 2, "recall": 1 / 3, "f1": 2 / 5, "rows": 3},
        "b": {"precision": 1.0, "recall": 1.0, "f1": 1.0, "rows": 1},
        "c": {"precision": 1 / 3, "recall": 1 / 2, "f1": 2 / 5, "rows": 2},
        "d": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "rows": 0},
    }
    for label, expected in per_class.items():
        assert scores["per_class"][label] == pytest.approx(expected), label
    assert scores["macro_f1"] == pytest.approx((2 / 5 + 1 + 2 / 5) / 3)  # without d
    assert json.loads(json.dumps(scores, allow_nan=False)) == scores


def test_a_class_that_is_predicted_and_never_right_pulls_macro_f1_down():
    """a: precision 1, recall 1/2, F1 2/3. b: 0, though no row has it."""
    scores = classify([0, 1], [0, 0], ["a", "b"])
    assert scores["per_class"]["a"]["f1"] == pytest.approx(2 / 3)
    assert scores["macro_f1"] == pytest.approx((2 / 3 + 0) / 2)


def test_a_class_that_is_never_predicted_has_no_precision_and_counts_as_0():
    scores = classify([0, 0, 0, 0], [0, 0, 0, 1], ["a", "b"])
    assert scores["accuracy"] == 0.75
    assert scores["per_class"]["b"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "rows": 1}
    assert scores["macro_f1"] == pytest.approx((6 / 7 + 0) / 2)


def test_all_right_is_1():
    scores = classify([1, 0, 1], [1, 0, 1], ["a", "b"])
    assert (scores["accuracy"], scores["macro_f1"]) == (1.0, 1.0)
