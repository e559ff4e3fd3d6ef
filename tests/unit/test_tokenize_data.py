"""Rule tokenize_data, on real files: token folders that training opens, and lint.json."""

import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenize_data
from chats import family, row, talk, turn
from finetune import parallel
from finetune.cli import UserError
from finetune.encoding import IGNORED
from finetune.files import check_complete
from finetune.records import SCHEMA
from finetune.tokenizer import load_tokenizer
from finetune.tokens import open_tokens

SETTINGS = {
    "system_prompt": None,
    "train_on": "completions",
    "max_length": 60,
    "truncate": "drop",
    "packing": False,
    "trust_remote_code": False,
    "template_options": {},
}
STATS = {
    "rows": {"train": 3, "validation": 0, "test": 0},
    "duplicates": 1,
    "rejected": {"a.jsonl": 2},
    "overlap": 0,
}
CAUSAL = {"causal": True, "architecture": "LlamaForCausalLM"}
HEADER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ROWS = [
    row(talk("turn on", "yes"), place="a.jsonl:1"),
    row(talk("turn off the light in the kitchen " * 9, "no"), place="a.jsonl:2"),
    row(talk("what <|im_end|>", "no one", system="Be short."), place="a.jsonl:4"),
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(train=…, validation=…, test=…, **settings): the rule; gives folder and lint.json."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    tokenize_data.tokenizer_of.cache_clear()

    monkeypatch.setattr(parallel, "ALONE", 0)  # else so few rows are done in one process

    def run(
        train=ROWS,
        validation=(),
        test=(),
        name="chatml",
        model=CAUSAL,
        threads=1,
        group=1000,
        **changes,
    ):
        family(name).save_pretrained(tmp_path / "model")
        (tmp_path / "model.json").write_text(json.dumps(model))
        (tmp_path / "stats.json").write_text(json.dumps(STATS | {"more": 1}))
        for split, rows in {"train": train, "validation": validation, "test": test}.items():
            with pq.ParquetWriter(tmp_path / f"{split}.parquet", SCHEMA) as writer:
                if rows or split == "test":  # no row group, or one without rows
                    table = pa.Table.from_pylist(list(rows), schema=SCHEMA)
                    writer.write_table(table, row_group_size=group)
        paths = {"data": tmp_path, "model": tmp_path / "model", "output": tmp_path / "tokens"}
        command = ["tokenize_data.py", "--settings", json.dumps(SETTINGS | changes)]
        command += [part for key, value in paths.items() for part in (f"--{key}", str(value))]
        monkeypatch.setattr(sys, "argv", [*command, "--threads", str(threads)])
        tokenize_data.main()
        return paths["output"], json.loads((paths["output"] / "lint.json").read_text())

    return run


def everything(folder: Path) -> dict[str, list]:
    return {split: open_tokens(folder / split).to_list() for split in tokenize_data.SPLITS}


@pytest.mark.parametrize("rows", [ROWS, [row(None, text="turn on")]], ids=["chat", "text"])
def test_a_model_that_writes_no_text_needs_labels(rows, run, tmp_path):
    with pytest.raises(UserError) as caught:
        run(train=rows, model={"causal": False, "architecture": "BertModel"})
    assert str(caught.value) == (
        "BertModel writes no text: it can be trained for `task: sequence-classification` alone, "
        "and these rows have no labels. Give it the columns `text` and `label`, or map yours "
        "under the dataset (`columns: {text: …, label: …}`), or choose a causal language model."
    )
    assert not (tmp_path / "tokens").exists()


def test_a_model_that_writes_no_text_takes_labelled_rows(run):
    rows = [row(None, text=f"turn on {n}", label="ab"[n % 2]) for n in range(4)]
    _, lint = run(train=rows, model={"causal": False, "architecture": "BertModel"})
    assert (lint["task"], lint["labels"]) == ("sequence-classification", ["a", "b"])


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
    check_complete(folder / "train")


def test_lint_says_exactly_what_there_is(run):
    folder, lint = run(validation=ROWS[:1])
    lengths = open_tokens(folder / "train")["length"][:]
    histogram = lint["train"].pop("histogram")
    long = histogram["edges"][-1]
    assert long > SETTINGS["max_length"]
    assert (sum(histogram["counts"]), histogram["counts"][-1]) == (3, 1)
    first, last = lint["train"].pop("samples")
    assert lint["train"] == {
        "rows": 3,
        "examples": 2,
        "sequences": 2,
        "tokens": sum(lengths),
        "longest": lengths[1],
        "most_supervised": 3,
        "dropped": {"too_long": 1, "unsupervised": 0},
        "supervised_tokens": 2 + 3,
        "truncated": 0,
        "rewritten": 0,
        "empty_thoughts": 0,
        "control_tokens": 1,
        "with_bos": 0,
        "eos_tokens": 2 + 4,
        "endings": 2,
        "ended": 2,
        "quantiles": {"p50": lengths[1], "p90": long, "p99": long},
    }
    assert first == {
        "id": "a.jsonl:1",
        "pieces": [[False, HEADER.format("turn on")], [True, "yes<|im_end|>"]],
    }
    assert last["id"] == "a.jsonl:4"
    assert lint["validation"]["rows"] == lint["validation"]["examples"] == 1
    assert lint["test"]["rows"] == 0
    assert {key: lint[key] for key in ("task", "labels", "label_counts")} == {
        "task": "causal-lm",
        "labels": None,
        "label_counts": None,
    }
    assert lint["prepared"] == STATS
    assert lint["settings"] == SETTINGS


def test_the_lengths_of_dropped_rows_count_in_quantiles(run):
    _, lint = run(train=ROWS[1:2])
    assert lint["train"]["examples"] == lint["train"]["longest"] == 0
    assert lint["train"]["quantiles"]["p50"] > SETTINGS["max_length"]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_an_empty_split_opens_like_any_other(run, split):
    """`validation: 0` is a documented setting."""
    folder, lint = run()
    assert (lint[split]["rows"], lint[split]["samples"]) == (0, [])
    assert lint[split]["histogram"] == {"edges": [], "counts": []}
    tokens = open_tokens(folder / split)
    assert len(tokens) == 0
    assert tokens.features == open_tokens(folder / "train").features


def test_a_split_of_rows_that_are_all_dropped_opens_too(run):
    folder, lint = run(validation=ROWS[1:2])
    assert lint["validation"]["dropped"]["too_long"] == 1
    tokens = open_tokens(folder / "validation")
    assert len(tokens) == 0
    assert tokens.features == open_tokens(folder / "train").features


def test_texts_and_conversations_in_one_dataset(run):
    folder, lint = run(train=[ROWS[0], row(text="turn on the light " * 20, place="b.txt:1")])
    tokens = open_tokens(folder / "train")
    assert len(tokens) == lint["train"]["examples"] > 2
    assert set(tokens["id"]) == {"a.jsonl:1", "b.txt:1"}
    assert max(tokens["length"]) == 60
    assert lint["train"]["rows"] == lint["train"]["endings"] == 2


MANY = [
    row([*talk(f"ask {i}", f"say {i}"), *talk("turn " * (i % 9), "yes")], place=f"a.jsonl:{i}")
    for i in range(1, 40)
] + [row(text="on off " * i, place=f"b.txt:{i}") for i in range(1, 20)]


def test_processes_change_nothing(run):
    folder, lint = run(train=MANY, test=MANY[:9], name="qwen3", group=7)
    tokens = everything(folder)
    folder, same = run(train=MANY, test=MANY[:9], name="qwen3", group=7, threads=2)
    assert everything(folder) == tokens
    assert same == lint
    assert len(list((folder / "train").glob("*.arrow"))) == 9


def test_parts_change_the_order_at_most(run):
    folder, lint = run(train=MANY, name="qwen3")
    tokens = {(t["id"], *t["input_ids"], *t["labels"]) for t in everything(folder)["train"]}
    folder, same = run(train=MANY, name="qwen3", group=7)
    parts = {(t["id"], *t["input_ids"], *t["labels"]) for t in everything(folder)["train"]}
    assert tokens == parts
    assert lint["train"].pop("samples") != []
    assert same["train"].pop("samples") != []
    assert same == lint


def test_memory_is_bounded_by_parts_and_batches(run, monkeypatch):
    """Rows are read a batch at a time, and no batch reaches over a row group."""
    sizes = []
    encode = tokenize_data.Encoder.encode
    monkeypatch.setattr(tokenize_data, "BATCH", 4)
    monkeypatch.setattr(
        tokenize_data.Encoder,
        "encode",
        lambda self, rows: sizes.append(len(rows)) or encode(self, rows),
    )
    run(train=MANY[:13], group=6)
    assert sizes == [4, 2, 4, 2, 1]


# Labelled rows


def labelled(*labels):
    return [row(text=f"turn {n}", label=x, place=f"c.csv:{n}") for n, x in enumerate(labels)]


def test_classes_are_the_sorted_labels_of_all_splits(run):
    folder, lint = run(
        train=labelled("no", "yes", "no"), validation=labelled("yes"), test=labelled("a", "no")
    )
    assert (lint["task"], lint["labels"]) == ("sequence-classification", ["a", "no", "yes"])
    assert lint["label_counts"] == [0, 2, 1]
    tokens = open_tokens(folder / "train")
    assert tokens["labels"][:] == [1, 2, 1]
    assert open_tokens(folder / "test")["labels"][:] == [0, 1]
    assert lint["train"]["samples"][1]["label"] == "yes"
    assert lint["train"]["supervised_tokens"] == lint["train"]["endings"] == 0
    empty = run(train=labelled("a", "b"))[0] / "test"
    assert open_tokens(empty).features == tokens.features


def test_one_class_is_no_task(run):
    with pytest.raises(UserError) as error:
        run(train=labelled("a", "a"), test=labelled("a"))
    assert str(error.value) == (
        "3 rows have 1 different labels (a). Is it the right column? Map yours: `columns: "
        "{label: …}`."
    )


def test_a_class_for_each_row_is_no_task(run):
    names = [f"name {n:02d}" for n in range(21)]
    with pytest.raises(UserError) as error:
        run(train=labelled(*names))
    assert str(error.value).startswith(
        "21 rows have 21 different labels (name 00, name 01, name 02, name 03, name 04, …). Is"
    )
    assert len(run(train=labelled(*names, *names))[1]["labels"]) == 21
    assert len(run(train=labelled(*names[:20]))[1]["labels"]) == 20


def test_rows_with_and_without_a_label_are_refused(run):
    with pytest.raises(UserError) as error:
        run(train=[*labelled("a", "b"), ROWS[0]], test=[row(text="on")])
    assert str(error.value) == (
        "2 of 4 rows have no label. Rows to classify and rows to write cannot be in one dataset: "
        "make two, or leave a source out."
    )


# Failures, and the last line


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failure_names_the_row_and_leaves_no_half_of_a_split(run, tmp_path, threads):
    refused = row([turn("user", "on"), turn("assistant", "yes", tool_calls=[CALL])], place="x:9")
    with pytest.raises(UserError, match=r"^x:9: the chat template leaves out the tool calls"):
        run(train=[*MANY, refused, *MANY], threads=threads, group=7)
    assert list((tmp_path / "tokens").iterdir()) == []


CALL = {"type": "function", "function": {"name": "set", "arguments": {}}}


def test_what_the_terminal_is_told(run, tmp_path, capsys):
    _, lint = run(validation=ROWS[1:2])
    train = lint["train"]
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"tokenize_data {tmp_path.name} for tokens: {train['tokens']} training tokens in 2 rows "
        f"(longest {train['longest']}), {5 / train['tokens']:.0%} supervised; 2 rows left out"
    )
    run(train=labelled("a", "b"))
    assert "in 2 rows (longest 3), 2 classes; 0 rows" in capsys.readouterr().err
