"""Gates of the data check: exact lines at and around each limit."""

import pytest

from finetune.checks import GATES, failed_checks, notices, percent
from finetune.config import Checks
from lint_record import EMPTY, LABELLED, lint

LIMITS = Checks().model_dump()


def failed(record, **limits):
    return failed_checks(record, LIMITS | limits)


def test_there_is_one_gate_for_each_key_of_the_config():
    assert [gate.key for gate in GATES] == list(Checks.model_fields)


def test_good_data_passes():
    assert failed(lint()) == []
    assert failed(LABELLED) == []


def test_to_learn_the_empty_thought_is_said_until_it_is_chosen():
    assert notices(lint()) == notices(LABELLED) == []
    thoughtless = lint(train={"empty_thoughts": 1234})
    [line] = notices(thoughtless)
    assert line.startswith("1,234 training answers begin with an empty thought of the chat ")
    assert "Set template_options: {enable_thinking: false} under the model" in line
    assert failed(thoughtless) == []
    chosen = {"template_options": {"enable_thinking": True}}
    assert notices(lint(thoughtless, settings=chosen)) == []


AT_LIMIT = {
    "min_supervised": {"train": {"supervised_tokens": 500}},
    "min_ended": {"train": {"ended": 990}},
    "max_dropped": {"train": {"dropped": {"too_long": 60, "unsupervised": 40}}},
    "max_truncated": {"train": {"truncated": 200}},
    "max_control_tokens": {"train": {"control_tokens": 10}},
    "max_overlap": {"prepared": {"overlap": 10}},
}
BEYOND = {
    "min_supervised": (
        {"train": {"supervised_tokens": 499}},
        "0.499% of 100,000 training tokens are trained on (checks.min_supervised asks for at "
        "least 0.5%). Look at the samples: if answers are not marked, change train_on (now "
        "completions); if they are short beside their prompts, lower the limit.",
    ),
    "min_ended": (
        {"train": {"ended": 989}},
        "98.9% of 1,000 training examples, not counting those cut at the end, end a turn with "
        "their last supervised token (checks.min_ended asks for at least 99%). The model would "
        "not learn to stop. Take a chat_template that writes an end marker after every answer, "
        "such as chatml.",
    ),
    "max_dropped": (
        {"train": {"dropped": {"too_long": 61, "unsupervised": 40}}},
        "10.1% of 1,000 training rows were left out: 61 are longer than max_length 512, 40 hold "
        "nothing that is trained on (checks.max_dropped allows 10%). Raise max_length, or set "
        "truncate: end. Rows need an answer that train_on (now completions) covers and truncate "
        "(now drop) leaves in.",
    ),
    "max_truncated": (
        {"train": {"truncated": 201}},
        "20.1% of 1,000 training rows were cut to max_length 512 (checks.max_truncated allows "
        "20%). Raise max_length, or raise the limit if what is cut does not matter.",
    ),
    "max_control_tokens": (
        {"train": {"control_tokens": 11}},
        "1.1% of 1,000 training rows hold a control token of the model in their own text "
        "(checks.max_control_tokens allows 1%). The model would take it for the end of a turn or "
        "the like. Clean the rows, or raise the limit if it belongs there.",
    ),
    "max_overlap": (
        {"prepared": {"overlap": 11}},
        "5.5% of 200 test rows have a prompt that is trained on too (checks.max_overlap allows "
        "5%). Scores would count what was memorized. Set split.group to a column that such rows "
        "share, or take them out of one of the sources.",
    ),
}


@pytest.mark.parametrize("key", AT_LIMIT)
def test_a_share_at_its_limit_passes(key):
    assert failed(lint(**AT_LIMIT[key])) == []


@pytest.mark.parametrize("key", BEYOND)
def test_a_share_just_beyond_its_limit_fails_with_figures_and_advice(key):
    changes, line = BEYOND[key]
    assert failed(lint(**changes)) == [line]


@pytest.mark.parametrize("key", BEYOND)
def test_the_limit_is_that_of_the_config(key):
    changes, _ = BEYOND[key]
    assert failed(lint(**changes), **{key: 0 if key.startswith("min_") else 1}) == []


def test_every_failing_gate_has_its_line_in_the_order_of_the_config():
    lines = failed(lint(train={"truncated": 900, "ended": 0}, prepared={"overlap": 200}))
    assert [line.split("checks.")[1].split()[0] for line in lines] == [
        *("min_ended", "max_truncated", "max_overlap")
    ]


@pytest.mark.parametrize("dropped", [{"too_long": 200}, {"unsupervised": 200}])
def test_only_the_cause_at_work_is_named(dropped):
    [line] = failed(lint(train={"dropped": dropped}))
    assert ("200 are longer than max_length" in line) == ("too_long" in dropped)
    assert ("200 hold nothing" in line) == ("unsupervised" in dropped)
    assert ("truncate: end" in line) == ("too_long" in dropped)
    assert ("train_on (now completions)" in line) == ("unsupervised" in dropped)


@pytest.mark.parametrize(
    "changes", [{"truncated": 201}, {"dropped": {"too_long": 201}}], ids=["cut", "dropped"]
)
def test_advice_to_raise_max_length_says_how_far(changes):
    [line] = failed(lint(train=changes | {"quantiles": {"p99": 1811}}))
    assert "Raise max_length (p99 is 1,811 tokens), or " in line
    [line] = failed(lint(train=changes | {"quantiles": {"p99": 512}}))
    assert "Raise max_length, or " in line


def test_gates_of_answers_do_not_ask_anything_of_labelled_rows():
    assert failed(LABELLED, min_supervised=0.9, min_ended=1) == []
    [line] = failed(lint(LABELLED, train={"truncated": 201}))
    assert "checks.max_truncated" in line


def test_plain_text_in_pieces_without_an_end_passes():
    text = {"supervised_tokens": 100_000, "endings": 0, "ended": 0}
    assert failed(lint(train=text), min_ended=1) == []


def test_an_empty_test_split_has_no_overlap():
    assert failed(lint(test=EMPTY, prepared={"rows": {"test": 0}}), max_overlap=0) == []


def test_a_training_split_of_no_tokens_is_not_divided_by():
    nothing = {"rows": 0, "tokens": 0, "endings": 0}
    assert failed(lint(train=EMPTY | {"sequences": 1} | nothing)) == []


def eaten(rows, **dropped):
    return lint(train=EMPTY | {"rows": rows, "dropped": EMPTY["dropped"] | dropped})


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            eaten(0),
            "The training split has no rows. Lower split.validation and split.test, or check "
            "`into` of the sources.",
        ),
        (
            eaten(1500, too_long=1500),
            "None of 1,500 training rows is left: 1,500 are longer than max_length 512. Raise "
            "max_length, or set truncate: end.",
        ),
        (
            eaten(5, unsupervised=5),
            "None of 5 training rows is left: 5 hold nothing that is trained on. Rows need an "
            "answer that train_on (now completions) covers and truncate (now drop) leaves in.",
        ),
    ],
    ids=["no rows", "too long", "unsupervised"],
)
def test_a_training_split_with_nothing_left_fails_whatever_the_limits(record, line):
    loosest = {key: 0 if key.startswith("min_") else 1 for key in LIMITS}
    assert failed(record, **loosest) == [line]


@pytest.mark.parametrize(
    ("share", "others", "text"),
    [
        (0, [], "0.0%"),
        (1, [], "100.0%"),
        (0.1234, [], "12.3%"),
        (0.99996, [], "99.996%"),
        (0.00002, [], "0.002%"),
        (0.1002, [0.1], "10.02%"),
        (0.5, [0.1], "50.0%"),
    ],
)
def test_a_percentage_has_as_many_decimals_as_it_needs(share, others, text):
    assert percent(share, *others) == text


def test_braces_in_settings_are_left_alone():
    settings = {"system_prompt": "{whole}", "template_options": {"a": "{b}"}}
    changes, line = BEYOND["max_truncated"]
    assert failed(lint(settings=settings, **changes)) == [line]
