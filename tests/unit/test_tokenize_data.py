"""Rule tokenize_data: token folders that training can open, and what lint.json counts."""

import json
import sys

import datasets
import pytest

import prepare_data
import tokenize_data
from finetune.chat import IGNORED, Example, encode
from finetune.cli import UserError
from finetune.tokenizer import load_tokenizer
from finetune.tokens import open_tokens
from project import tiny_tokenizer

SETTINGS = {"system_prompt": None, "max_length": 60, "trust_remote_code": False}
HEADER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def row(name, question, answer, system=None):
    turns = [("system", system)] * (system is not None)
    turns += [("user", question), ("assistant", answer)]
    return {"id": name, "messages": [{"role": r, "content": c} for r, c in turns]}


ROWS = [
    row("a.jsonl:1", "turn on", "yes"),
    row("a.jsonl:2", "turn off the light in the kitchen " * 9, "no"),
    row("a.jsonl:4", "what", "no one", system="Be short."),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What `datasets` caches must not outlive a test, nor what the rule says about it."""
    datasets.enable_caching()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(train=…, validation=…, test=…, **settings): the rule; gives folder and lint.json."""

    def write(splits, template):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = tokenizer.chat_template if template else None
        tokenizer.save_pretrained(tmp_path / "model")
        for split, rows in splits.items():
            with prepare_data.SplitWriter(tmp_path / f"{split}.parquet") as writer:
                for row in rows:
                    writer.add(row)

    def run(train=ROWS, validation=(), test=(), template=True, again=False, **changes):
        if not again:
            write({"train": train, "validation": validation, "test": test}, template)
        paths = {"data": tmp_path, "model": tmp_path / "model", "output": tmp_path / "tokens"}
        command = ["tokenize_data.py", "--settings", json.dumps(SETTINGS | changes)]
        command += [part for key, value in paths.items() for part in (f"--{key}", str(value))]
        monkeypatch.setattr(sys, "argv", command)
        tokenize_data.main()
        return paths["output"], json.loads((paths["output"] / "lint.json").read_text())

    return run


def test_rows_are_kept_with_ids_labels_lengths_and_an_index(run):
    folder, _ = run()
    tokens = open_tokens(folder / "train")
    assert tokens["id"][:] == ["a.jsonl:1", "a.jsonl:4"]
    assert tokens["row"][:] == [0, 1]
    assert sorted(tokens.column_names) == ["id", "input_ids", "labels", "length", "row"]
    tokenizer = load_tokenizer(folder.parent / "model")
    first = tokens[0]
    assert tokenizer.decode(first["input_ids"]) == HEADER.format("turn on") + "yes<|im_end|>"
    assert first["length"] == len(first["input_ids"]) == len(first["labels"])
    assert [label for label in first["labels"] if label != IGNORED] == first["input_ids"][-2:]


def test_lint_counts_tokens_dropped_rows_and_end_tokens(run):
    folder, lint = run(validation=ROWS[:1])
    tokens = open_tokens(folder / "train")
    samples = lint["train"].pop("samples")
    assert lint["train"] == {
        "rows": 2,
        "too_long": 1,
        "tokens": sum(tokens["length"]),
        "supervised_tokens": 2 + 3,
        "rows_with_end_token": 2,
        "longest": max(tokens["length"]),
    }
    assert samples[0] == {
        "id": "a.jsonl:1",
        "text": HEADER.format("turn on") + "yes<|im_end|>",
        "trained_on": "yes<|im_end|>",
    }
    assert lint["validation"]["rows"] == 1


def test_max_length_is_inclusive(run):
    _, lint = run(train=ROWS[:1])
    longest = lint["train"]["longest"]
    assert run(train=ROWS[:1], max_length=longest)[1]["train"]["rows"] == 1
    with pytest.raises(UserError, match=r"all 1 training rows are longer than max_length"):
        run(train=ROWS[:1], max_length=longest - 1)


def test_the_system_prompt_goes_to_rows_without_one(run):
    _, lint = run(train=[ROWS[0], ROWS[2]], system_prompt="Say yes.", max_length=80)
    texts = [sample["text"] for sample in lint["train"]["samples"]]
    assert texts[0].startswith("<|im_start|>system\nSay yes.<|im_end|>\n<|im_start|>user\nturn on")
    assert texts[1].startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nwhat")
    assert lint["train"]["supervised_tokens"] == 2 + 3


EMPTY = {
    "rows": 0,
    "too_long": 0,
    "tokens": 0,
    "supervised_tokens": 0,
    "rows_with_end_token": 0,
    "longest": 0,
    "samples": [],
}


def test_an_empty_split_opens_like_any_other(run):
    """`validation: 0` is a documented setting."""
    folder, lint = run()
    assert lint["validation"] == EMPTY
    tokens = open_tokens(folder / "validation")
    assert len(tokens) == 0
    assert tokens.features == open_tokens(folder / "train").features


def test_a_split_of_too_long_rows_alone_opens_too(run):
    folder, lint = run(validation=ROWS[1:2])
    assert lint["validation"] == EMPTY | {"too_long": 1}
    tokens = open_tokens(folder / "validation")
    assert len(tokens) == 0
    assert tokens.features == open_tokens(folder / "train").features


def test_no_stale_cache_after_a_change_of_the_code(run, monkeypatch):
    """`datasets` knows a result by the arguments of `map`, and encode() is none of them."""
    assert run()[1]["train"]["supervised_tokens"] == 2 + 3

    def masked(tokenizer, messages):
        example = encode(tokenizer, messages)
        return Example(example.input_ids, [IGNORED] * len(example.labels))

    monkeypatch.setattr(tokenize_data, "encode", masked)
    assert run(again=True)[1]["train"]["supervised_tokens"] == 0


def test_processes_change_nothing(monkeypatch):
    monkeypatch.setattr(tokenize_data, "ROWS_WORTH_A_PROCESS", 1)
    rows = datasets.Dataset.from_list(ROWS)
    tokenizer = tiny_tokenizer()
    one, counts = tokenize_data.tokenize(rows, tokenizer, SETTINGS, 1)
    two, same = tokenize_data.tokenize(rows, tokenizer, SETTINGS, 2)
    assert one.to_list() == two.to_list()
    assert counts == same == {"rows": 2, "too_long": 1}


def test_a_model_without_a_template_is_told_what_to_set(run):
    with pytest.raises(UserError, match=r"no chat template\. Set `chat_template: plain`"):
        run(template=False)


def test_what_the_terminal_is_told(run, capsys):
    _, lint = run(validation=ROWS[1:2])
    train = lint["train"]
    share = round(100 * 5 / train["tokens"])
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"tokenize_data: {train['tokens']} training tokens in 2 rows (longest "
        f"{train['longest']}), {share}% supervised; 2 rows over max_length left out"
    )
