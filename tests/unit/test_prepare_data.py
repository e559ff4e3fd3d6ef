"""Rule prepare_data: from odd files to rows in one shape, exact counts, and clear refusals."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, DatasetDict
from datasets import Dataset as Rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prepare_data
from finetune import json_text, parallel, places, readers
from finetune.cli import UserError
from finetune.config import Dataset
from finetune.records import SCHEMA
from finetune.splits import SPLITS, choose_split
from finetune.stages import prepare_settings

SHARES = {"validation": 0.2, "test": 0.3, "seed": 4}
PROMPTS = [f"What is {n} + {n}?" for n in range(300)]
QUOTES = "not JSON: Expecting property name enclosed in double quotes"


def pair(prompt: object, completion: object = "Yes.", **more: object) -> dict:
    return {"prompt": prompt, "completion": completion} | more


def chat(prompt: str, completion: str = "Yes.") -> dict:
    return {
        "messages": [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]
    }


def turns(prompt: str, completion: str = "Yes.") -> list[dict]:
    """As they are in a prepared row."""
    return [turn | {"train": True, "extra": None} for turn in chat(prompt, completion)["messages"]]


def write(name: str, *rows: object) -> None:
    """Rows as JSON lines; a text is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    content = "".join(f"{line}\n" for line in lines).encode()
    Path(name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def asked(rows: dict[str, list], split: str = "train") -> list[str]:
    return [row["messages"][0]["content"] for row in rows[split]]


def refused(prepare, *args, **keys) -> str:
    with pytest.raises(UserError) as caught:
        prepare(*args, **keys)
    return str(caught.value)


def rejects() -> list[dict]:
    return [json.loads(line) for line in Path("rejects.jsonl").read_text().splitlines()]


# what is written


def test_rows_in_one_shape_with_the_place_they_came_from(prepare) -> None:
    write("a.jsonl", pair("one", n=1), "", pair("two"))
    Path("b.csv").write_text('prompt,completion\n"th\nree",3\nfour,4\n')
    write("c.jsonl.gz", chat("five", "5") | {"tools": [{"name": "f"}]})
    _, rows = prepare(["a.jsonl", "b.csv", "c.jsonl.gz"])
    nothing = {"tools": None, "text": None, "label": None}
    tools = '[{"function": {"name": "f"}, "type": "function"}]'
    assert rows["train"] == [
        {"id": "a.jsonl:1", "messages": turns("one")} | nothing,
        {"id": "a.jsonl:3", "messages": turns("two")} | nothing,
        {"id": "b.csv:2", "messages": turns("th\nree", "3")} | nothing,
        {"id": "b.csv:4", "messages": turns("four", "4")} | nothing,
        {"id": "c.jsonl.gz:1", "messages": turns("five", "5")} | nothing | {"tools": tools},
    ]
    assert rows["validation"] == []
    assert pq.read_schema("out/validation.parquet").equals(SCHEMA)
    assert Path("rejects.jsonl").read_text() == ""


def test_stats_hold_counts_digests_and_settings(prepare) -> None:
    write("a.jsonl", pair("one"), pair("one"), pair("Held  OUT", "other"), "{", pair(""))
    write("empty.jsonl")
    stats, _ = prepare(["a.jsonl", "empty.jsonl"], max_rejects=0.5)
    none = {"rows": 0, "duplicates": 0, "weighed_out": 0, "rejected": 0}
    names = ("a.jsonl", "empty.jsonl", "held-out.jsonl")
    settings = prepare_settings(
        Dataset(
            source=["a.jsonl", "empty.jsonl", {"path": "held-out.jsonl", "into": "test"}],
            split={"validation": 0, "test": 0},
            max_rejects=0.5,
        )
    )
    assert stats == {
        "rows": {"train": 2, "validation": 0, "test": 1},
        "duplicates": 1,
        "overlap": 1,
        "rejected": {QUOTES: 1, "prompt is empty": 1},
        "by_source": {
            "held-out.jsonl": none | {"rows": 1},
            "a.jsonl": {"rows": 3, "duplicates": 1, "weighed_out": 0, "rejected": 2},
            "empty.jsonl": none,
        },
        "sources": {n: hashlib.sha256(Path(n).read_bytes()).hexdigest() for n in names},
        "commits": {},
        "settings": settings,
    }


def test_what_is_said_at_the_end(prepare, capsys) -> None:
    write("a.jsonl", pair("one"), pair("one"), pair("two"), "{")
    prepare("a.jsonl", max_rejects=0.5)
    left_out = "left out: 1 duplicates, 1 rejected"
    said = f"prepare_data out: 2 train, 0 validation, 1 test rows; {left_out}\n"
    assert capsys.readouterr().err == said
    write("b.jsonl", *map(pair, PROMPTS))
    stats, _ = prepare({"path": "b.jsonl", "weight": 0.5})
    out = f"prepare_data out: {stats['rows']['train']} train, 0 validation, 1 test rows; left out: "
    out += f"0 duplicates, 0 rejected, {300 - stats['rows']['train']} by weight\n"
    assert capsys.readouterr().err == out


def test_every_reject_is_written_with_its_place_and_reason(prepare) -> None:
    write("a.jsonl", pair("one"), '{"prompt": "é', pair("two", None), pair("a\ud83d"))
    Path("b.csv").write_text("prompt,completion\nthree\n")
    prepare(["a.jsonl", "b.csv"], max_rejects=0.9)
    lone = "prompt holds a lone surrogate, which is no text"
    assert rejects() == [
        {"source": "a.jsonl", "line": 2, "reason": "not JSON: Unterminated string starting at"},
        {"source": "a.jsonl", "line": 3, "reason": "completion is missing"},
        {"source": "a.jsonl", "line": 4, "reason": lone},
        {"source": "b.csv", "line": 2, "reason": "another number of fields than the header"},
    ]


def test_columns_of_the_user(prepare) -> None:
    Path("a.csv").write_text("q,a,prompt\nHi.,Yes.,other\n")
    write("held.jsonl", {"q": "x", "a": "y"})
    source = ["a.csv", {"path": "held.jsonl", "into": "test"}]
    columns = {"prompt": "q", "completion": "a"}
    _, rows = prepare(source, columns=columns, held_out=None)
    assert rows["train"][0]["messages"] == turns("Hi.")


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_a_column_of_the_user_that_few_rows_have(size, prepare, monkeypatch) -> None:
    """It first occurs behind the rows from which the format is told."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", size)
    write("a.jsonl", *map(pair, PROMPTS[:150]), pair("last", persona="Be kind."))
    _, rows = prepare("a.jsonl", columns={"system": "persona"})
    assert rows["train"][-1]["messages"][0]["role"] == "system"
    assert {len(row["messages"]) for row in rows["train"][:-1]} == {2}


def test_a_column_of_the_user_that_no_row_has(prepare) -> None:
    write("a.jsonl", *map(pair, PROMPTS[:150]), pair("last", persona="Be kind."))
    columns = {"system": "personna", "tools": "functions", "prompt": "prompt"}
    assert refused(prepare, "a.jsonl", columns=columns) == (
        "`columns` names functions, personna, and no row that was read has such a column"
    )


def test_missing_cells_of_a_data_frame(prepare) -> None:
    import pandas as pd

    frame = pd.DataFrame({"text": ["a", float("nan"), "c"], "label": [1, 2, float("nan")]})
    frame.to_parquet("a.parquet")
    _, rows = prepare("a.parquet", held_out={"text": "x", "label": "y"}, max_rejects=0.9)
    assert [(row["text"], row["label"]) for row in rows["train"]] == [("a", "1")]
    assert [r["reason"] for r in rejects()] == ["text is missing", "label is missing"]


# formats


def test_format_chosen_where_the_columns_fit_both(prepare) -> None:
    write("a.jsonl", pair("Hi.") | chat("other"))
    assert refused(prepare, "a.jsonl") == (
        "a.jsonl fits messages and prompt-completion (columns: prompt, completion, messages). Set "
        "`format: messages` or `format: prompt-completion` under the dataset."
    )
    assert asked(prepare("a.jsonl", format="prompt-completion")[1]) == ["Hi."]


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_first_rows_that_are_bad_hide_no_format(size, prepare, monkeypatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", size)
    write("a.jsonl", *["{"] * 150, {"x": 1}, chat("one"), pair("two"), *map(chat, PROMPTS))
    stats, _ = prepare("a.jsonl", max_rejects=0.9)
    assert stats["rejected"] == {QUOTES: 150, "messages is missing": 2}


def test_file_of_broken_rows_has_no_format(prepare) -> None:
    write("a.jsonl", "{", "[")
    write("b.jsonl", {"text": "x", "label": "y"})
    stats, _ = prepare(
        ["a.jsonl", "b.jsonl"], held_out={"text": "z", "label": "y"}, max_rejects=0.9
    )
    assert stats["by_source"]["a.jsonl"]["rejected"] == 2


def test_said_format_that_no_row_has(prepare) -> None:
    write("a.jsonl", {"chat": []})
    assert refused(prepare, "a.jsonl", format="messages", held_out=chat("x")) == (
        "a.jsonl has the columns: chat. Needed: `messages`. Map yours under the dataset, e.g. "
        "`columns: {messages: chat}`."
    )


def test_places_of_several_formats_make_one_data_set(prepare) -> None:
    write("a.jsonl", chat("one"))
    write("b.jsonl", {"instruction": "two", "input": "", "output": "Yes."})
    write(
        "c.jsonl",
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "Yes."}]},
    )
    Path("d.txt").write_text("three\n")
    stats, rows = prepare(["a.jsonl", "b.jsonl", "c.jsonl", "d.txt"])
    assert [row["id"] for row in rows["train"]] == ["a.jsonl:1", "b.jsonl:1", "d.txt:1"]
    assert rows["train"][2] == {"id": "d.txt:1", "text": "three"} | dict.fromkeys(
        ("messages", "tools", "label")
    )
    assert stats["by_source"]["c.jsonl"]["duplicates"] == 1


def test_labelled_rows_and_others_do_not(prepare) -> None:
    write("a.jsonl", {"text": "x", "label": "y"})
    write("b.jsonl", {"text": "x"})
    assert refused(prepare, ["a.jsonl", "b.jsonl"], held_out=None) == (
        "labelled rows and others make no data set together: a.jsonl: text-label; b.jsonl: text"
    )


# duplicates and held-out rows


def test_duplicates_over_files_and_formats_keep_the_first(prepare) -> None:
    write("a.jsonl", pair("one"), pair("two"))
    Path("b.csv").write_text("prompt,completion\ntwo,Yes.\ntwo,No.\none,Yes.\n")
    stats, rows = prepare(["a.jsonl", "b.csv", "*.csv"])
    assert [row["id"] for row in rows["train"]] == ["a.jsonl:1", "a.jsonl:2", "b.csv:3"]
    assert stats["duplicates"] == 5


def test_rows_that_differ_in_weight_or_label_are_no_duplicates(prepare) -> None:
    light = chat("one")["messages"]
    light = [*light, *[light[0], light[1] | {"weight": 0}]]
    write("a.jsonl", {"messages": light}, {"messages": chat("one")["messages"] * 2})
    assert prepare("a.jsonl")[0]["duplicates"] == 0
    write("a.jsonl", {"text": "x", "label": "y"}, {"text": "x", "label": "z"})
    assert prepare("a.jsonl", held_out={"text": "w", "label": "y"})[0]["duplicates"] == 0


@pytest.mark.parametrize("last", [True, False])
def test_row_that_is_held_out_leaves_train_wherever_it_is_listed(last, prepare) -> None:
    write("train.jsonl", pair("one"), pair("two"), pair("three"))
    write("validation.jsonl", pair("three"), pair("two"))
    write("test.jsonl", pair("two"), pair("four"))
    given = [{"path": f"{split}.jsonl", "into": split} for split in ("validation", "test")]
    source = ["train.jsonl", *given] if last else [*given[::-1], "train.jsonl"]
    stats, rows = prepare(source, split={"validation": 0.3, "test": 0.3})
    assert {split: asked(rows, split) for split in SPLITS} == {
        "train": ["one"],
        "validation": ["three"],
        "test": ["two", "four"],
    }
    assert (stats["duplicates"], stats["overlap"]) == (3, 0)


def test_given_split_gets_no_other_rows_and_the_rest_is_drawn(prepare) -> None:
    write("a.jsonl", *map(pair, PROMPTS))
    write("test.jsonl", pair("given"))
    source = ["a.jsonl", {"path": "test.jsonl", "into": "test"}]
    stats, rows = prepare(source, split=SHARES)
    assert asked(rows, "test") == ["given"]
    assert 30 < stats["rows"]["validation"] < 90


def test_splits_of_a_saved_folder(prepare) -> None:
    label = ClassLabel(names=["no", "yes"])
    splits = {"train": ["a", "b", "c"], "validation": ["d", "a"], "test": ["e", "b", "d"]}
    saved = {
        name: Rows.from_dict({"text": texts, "label": [1] * len(texts)}).cast_column("label", label)
        for name, texts in splits.items()
    }
    DatasetDict(saved).save_to_disk("saved")
    stats, rows = prepare("saved", held_out=None)
    assert {s: [row["text"] for row in rows[s]] for s in SPLITS} == {
        "train": ["c"],
        "validation": ["a"],
        "test": ["e", "b", "d"],
    }
    assert rows["train"][0] == {
        "id": "saved/train:3",
        "messages": None,
        "tools": None,
        "text": "c",
        "label": "yes",
    }
    assert stats["by_source"]["saved"] == {
        "rows": 8,
        "duplicates": 3,
        "weighed_out": 0,
        "rejected": 0,
    }
    assert {name.removeprefix("saved/").split("/")[0] for name in stats["sources"]} == {
        "dataset_dict.json", "train", "validation", "test",
    }  # fmt: skip


def test_overlap_counts_test_prompts_that_are_trained_on(prepare) -> None:
    write("a.jsonl", pair("Turn ON  the light"), pair("two"), pair("two", "2"), pair("three"))
    write("test.jsonl", pair("turn on the light", "no"), pair("Two", "no"), pair("four"))
    stats, _ = prepare(["a.jsonl", {"path": "test.jsonl", "into": "test"}], held_out=None)
    assert stats["overlap"] == 2


# limits and weights


def limited(prepare, rows: int, *files: list) -> tuple[list[str], dict]:
    for number, lines in enumerate(files):
        write(f"{number}.jsonl", *lines)
    stats, found = prepare({"path": "?.jsonl", "rows": rows}, max_rejects=0.9)
    return asked(found), stats["by_source"]["?.jsonl"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [1, 1_000_000])
def test_limit_over_several_files(size, threads, prepare, monkeypatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", size)
    monkeypatch.setattr(parallel, "ALONE", 0)
    first = [pair("one"), "{", pair("two"), "{"]
    second = ["{", pair("one"), pair("three"), "{", pair("four"), *["{"] * 30]
    for limit, taken, duplicates, rejected in (
        (1, ["one"], 0, 0),
        (2, ["one", "two"], 0, 1),
        (3, ["one", "two"], 1, 3),
        (4, ["one", "two", "three"], 1, 3),
        (5, ["one", "two", "three", "four"], 1, 4),
        (6, ["one", "two", "three", "four"], 1, 34),
    ):
        found, counts = limited(prepare, limit, first, second)
        assert found == taken
        assert counts["rows"] == min(limit, 5)
        assert (counts["duplicates"], counts["rejected"]) == (duplicates, rejected)
        assert len(rejects()) == rejected


def test_limit_holds_for_each_split_that_a_source_brings(prepare) -> None:
    splits = {name: Rows.from_list([pair(f"{name} {n}") for n in range(5)]) for name in SPLITS}
    DatasetDict(splits).save_to_disk("saved")
    stats, _ = prepare({"path": "saved", "rows": 2}, held_out=None)
    assert stats["rows"] == dict.fromkeys(SPLITS, 2)


def test_limits_are_apart_for_each_entry(prepare) -> None:
    write("a.jsonl", *map(pair, PROMPTS[:9]))
    write("b.jsonl", *map(pair, PROMPTS[9:20]))
    source = [{"path": "a.jsonl", "rows": 3}, {"path": "b.jsonl", "rows": 4}]
    assert asked(prepare(source)[1]) == PROMPTS[:3] + PROMPTS[9:13]


@pytest.mark.parametrize(
    ("weight", "least", "most"), [(0.25, 50, 100), (1.5, 410, 490), (2, 600, 600)]
)
def test_weights(weight, least, most, prepare) -> None:
    write("a.jsonl", *map(pair, PROMPTS))
    stats, rows = prepare({"path": "a.jsonl", "weight": weight})
    assert least <= stats["rows"]["train"] <= most
    times = [asked(rows).count(prompt) for prompt in PROMPTS]
    assert set(times) == {0.25: {0, 1}, 1.5: {1, 2}, 2: {2}}[weight]
    assert stats["by_source"]["a.jsonl"]["weighed_out"] == times.count(0)
    # the same ones whatever else is there
    write("b.jsonl", *map(pair, ["new", *PROMPTS[::-1]]))
    _, again = prepare({"path": "b.jsonl", "weight": weight})
    assert sorted(set(asked(again)) - {"new"}) == sorted(set(asked(rows)))


def test_weights_leave_held_out_rows_alone(prepare) -> None:
    write("a.jsonl", *map(pair, PROMPTS))
    stats, rows = prepare({"path": "a.jsonl", "weight": 2}, split=SHARES)
    held_out = {s: [p for p in PROMPTS if p in asked(rows, s)] for s in ("validation", "test")}
    assert all(asked(rows, split) == prompts for split, prompts in held_out.items())
    assert stats["rows"]["train"] == 2 * (300 - sum(map(len, held_out.values())))


# refusals


def test_too_many_rejects_stop_with_the_commonest_reasons_and_an_example_of_each(prepare) -> None:
    bad = [pair(""), "{", pair("", "x"), pair("a", 3), "[]", pair(" "), "[1]", "x"]
    write("a.jsonl", pair("one"), *bad, pair("two"), pair("two"))
    assert refused(prepare, "a.jsonl", max_rejects=0.25) == (
        "8 of 12 rows cannot be used, more than max_rejects 25.00% allows: "
        "3 x prompt is empty (e.g. a.jsonl:2); 2 x not a JSON object (e.g. a.jsonl:6); "
        f"1 x {QUOTES} (e.g. a.jsonl:3). "
        "Mend them, or raise max_rejects under the dataset to leave them out."
    )
    assert [reject["line"] for reject in rejects()] == list(range(2, 10))
    assert not list(Path("out").iterdir())


@pytest.mark.parametrize(("bad", "works"), [(0, True), (1, True), (2, False)])
def test_max_rejects_is_a_share_of_all_rows(bad, works, prepare) -> None:
    write("a.jsonl", *["{"] * bad, *(pair(f"row {n}") for n in range(999 - bad)))
    if works:
        assert sum(prepare("a.jsonl")[0]["rejected"].values()) == bad
    else:
        text = refused(prepare, "a.jsonl")
        assert text.startswith("2 of 1000 rows cannot be used, more than max_rejects 0.10% allows")


def test_not_one_reject_where_none_is_allowed(prepare) -> None:
    write("a.jsonl", pair("one"), "{")
    text = refused(prepare, "a.jsonl", max_rejects=0)
    assert text.startswith("1 of 3 rows cannot be used, more than max_rejects 0.00% allows")


MORE = "Give more rows, another split.seed, or"


@pytest.mark.parametrize(
    ("rows", "split", "text"),
    [
        (
            0,
            {"validation": 0.1, "test": 0.1},
            f"train split is empty (0 rows in all). {MORE} smaller shares to the others.",
        ),
        (
            30,
            {"validation": 0.0001, "test": 0.5},
            f"validation split is empty (30 rows in all). {MORE} a larger share (validation: 0 if "
            "you want none).",
        ),
        (
            3,
            {"validation": 0, "test": 0.0001},
            f"test split is empty (3 rows in all). {MORE} a larger share.",
        ),
        (
            3,
            {"validation": 0, "test": 0},
            f"test split is empty (3 rows in all). {MORE} a larger share.",
        ),
        (
            3,
            {"validation": 0, "test": 0.9999},
            f"train split is empty (3 rows in all). {MORE} smaller shares to the others.",
        ),
    ],
)
def test_empty_split(rows, split, text, prepare) -> None:
    write("a.jsonl", *(pair(f"row {n}") for n in range(rows)))
    assert refused(prepare, "a.jsonl", split=split, held_out=None) == f"the {text}"


def test_empty_split_of_text_files(prepare) -> None:
    """What people have, is one long file."""
    Path("a.txt").write_text("one\ntwo\n")
    text = refused(prepare, "a.txt", split={"validation": 0, "test": 0.0001}, held_out=None)
    assert text.endswith(
        f"{MORE} a larger share. A .txt file is one row unless sample_by says otherwise."
    )


def test_failure_leaves_what_was_there_and_the_new_rejects(prepare) -> None:
    write("a.jsonl", pair("one"))
    prepare("a.jsonl")
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    write("a.jsonl", pair("two"), "{")
    refused(prepare, "a.jsonl")
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before
    assert rejects() == [{"source": "a.jsonl", "line": 2, "reason": QUOTES}]


def test_script_ends_with_one_line(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(pair("one")) + "\n{")
    settings = json.dumps(prepare_settings(Dataset(source="a.jsonl")))
    arguments = ["--settings", settings, "--output", "out", "--rejects", "rejects.jsonl"]
    command = [sys.executable, prepare_data.__file__, *arguments, "--threads", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == (
        "ERROR prepare_data out: 1 of 2 rows cannot be used, more than max_rejects 0.10% allows: "
        f"1 x {QUOTES} (e.g. a.jsonl:2). "
        "Mend them, or raise max_rejects under the dataset to leave them out.\n"
    )
    assert "Traceback" not in done.stderr


# splits


def test_split_is_by_the_content(prepare) -> None:
    write("a.jsonl", *map(pair, PROMPTS))
    _, rows = prepare("a.jsonl", split=SHARES)
    row = {"messages": turns(PROMPTS[0]), "tools": None, "text": None, "label": None}
    split = choose_split(json.dumps(row, ensure_ascii=False), 4, 0.2, 0.3)
    assert PROMPTS[0] in asked(rows, split)


def test_added_rows_move_no_old_one(prepare) -> None:
    write("a.jsonl", *map(pair, PROMPTS[:200]))
    before = prepare("a.jsonl", split=SHARES)[1]
    write("a.jsonl", *map(pair, PROMPTS[200:] + PROMPTS[:200]))
    after = prepare("a.jsonl", split=SHARES)[1]
    assert sum(len(asked(after, split)) for split in SPLITS) == 300
    assert all(set(asked(before, split)) <= set(asked(after, split)) for split in SPLITS)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_rows_of_a_group_stay_together(name, prepare) -> None:
    rows = [pair(prompt, user=n % 30) for n, prompt in enumerate(PROMPTS)]
    if name == "a.jsonl":
        write(name, *rows)
    elif name == "a.csv":
        Path(name).write_text(
            "".join(
                ["prompt,completion,user\n", *(f"{','.join(map(str, r.values()))}\n" for r in rows)]
            )
        )
    else:
        pq.write_table(pa.Table.from_pylist(rows), name)
    _, found = prepare(name, split=SHARES | {"group": "user"})
    homes = {(PROMPTS.index(p) % 30, split) for split in SPLITS for p in asked(found, split)}
    expected = {(n, choose_split(f"group {n}", 4, 0.2, 0.3)) for n in range(30)}
    assert homes == expected
    assert {split for _, split in homes} == set(SPLITS)


@pytest.mark.parametrize("group", [None, "", float("nan")], ids=repr)
def test_row_without_a_group_stands_alone(group, prepare) -> None:
    write("a.jsonl", *(pair(p, user=group) for p in PROMPTS))
    write("b.jsonl", *map(pair, PROMPTS))
    alone = prepare("a.jsonl", split=SHARES | {"group": "user"})[1]
    assert {s: asked(alone, s) for s in SPLITS} == {
        s: asked(prepare("b.jsonl", split=SHARES)[1], s) for s in SPLITS
    }


@pytest.mark.parametrize("group", ["a\ud800", {"id": 1}, True, 0, [None]], ids=repr)
def test_group_may_be_named_anything(group, prepare) -> None:
    write("a.jsonl", *(pair(p, user=group) for p in PROMPTS[:20]))
    split = choose_split(f"group {group}", 0, 0, 0.5)
    text = refused(prepare, "a.jsonl", split={"validation": 0, "test": 0.5, "group": "user"})
    assert text.startswith(f"the {'test' if split == 'train' else 'train'} split is empty")


def test_group_column_that_a_row_lacks(prepare) -> None:
    write("a.jsonl", *(pair(p, user=1) for p in PROMPTS[:9]), pair("two", usr="a"))
    split = {"validation": 0, "test": 0, "group": "user"}
    prepare("a.jsonl", split=split, max_rejects=0.1)
    reason = "no column 'user', which split.group names"
    assert rejects() == [{"source": "a.jsonl", "line": 10, "reason": reason}]


def test_rows_are_written_in_groups_and_in_order(prepare, monkeypatch) -> None:
    monkeypatch.setattr(prepare_data, "ROWS_PER_GROUP", 7)
    monkeypatch.setattr(readers, "BLOCK_ROWS", 4)
    Path("a.csv").write_text("prompt,completion\n" + "".join(f"{p},Yes.\n" for p in PROMPTS[:24]))
    _, rows = prepare("a.csv")
    assert asked(rows) == PROMPTS[:24]
    file = pq.ParquetFile("out/train.parquet")
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [8, 8, 8]


# whatever the files are like

WORDS = st.text(st.sampled_from('ab, "\n\té\u2028😀'), min_size=1, max_size=6).filter(str.strip)
MANY = settings(max_examples=25, suppress_health_check=list(HealthCheck))


def as_written(prompt: str, completion: str, format: str) -> dict:
    """One conversation in each format."""
    return {
        "messages": chat(prompt, completion),
        "sharegpt": {
            "conversations": [
                {"from": "human", "value": prompt},
                {"from": "gpt", "value": completion},
            ]
        },
        "alpaca": {"instruction": prompt, "input": "", "output": completion},
        "prompt-completion": pair(prompt, completion),
        "lists": {
            "prompt": chat(prompt, completion)["messages"][:1],
            "completion": chat(prompt, completion)["messages"][1:],
        },
    }[format]


FORMATS = ["messages", "sharegpt", "alpaca", "prompt-completion", "lists"]


def save(rows: list[dict], kind: str) -> str:
    """The rows as a file of some kind; its name."""
    name = f"rows.{kind}"
    table = pa.Table.from_pylist(rows)
    if kind == "saved":
        Rows(table).save_to_disk(name)
    elif kind.startswith("jsonl"):
        write(name, *rows)
    elif kind == "json":
        Path(name).write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(table, name)
    else:
        import csv

        with open(name, "w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            cells = [
                {k: v if isinstance(v, str) else json.dumps(v) for k, v in r.items()} for r in rows
            ]
            writer.writerows(cells)
    return name


def contents(rows: dict[str, list]) -> dict[str, set]:
    """By split, what the rows hold besides the place they came from."""
    return {s: {json.dumps({**row, "id": None}) for row in rows[s]} for s in SPLITS}


PAIRS = st.lists(st.tuples(WORDS, WORDS), min_size=8, max_size=20, unique=True)


KINDS = ["jsonl", "jsonl.gz", "json", "csv", "tsv", "parquet", "saved"]
SAME = [(f, k) for f in FORMATS for k in KINDS if f != "lists" or k not in ("csv", "tsv")]
"""Of a CSV file, a prompt is text, even if it looks like a list."""


@pytest.mark.parametrize(("format", "kind"), SAME)
def test_format_and_kind_of_file_change_no_row_and_no_split(format, kind, prepare) -> None:
    pairs = [(p, f'He said: "{n}",\n\té😀') for n, p in enumerate(PROMPTS[:60])]
    write("plain.jsonl", *(pair(*p) for p in pairs))
    expected = contents(prepare("plain.jsonl", split=SHARES)[1])
    name = save([as_written(*p, format) for p in pairs], kind)
    rows = prepare(name, split=SHARES)[1]
    found = contents(rows)
    assert found == expected
    assert len({row["id"] for split in SPLITS for row in rows[split]}) == len(pairs)
    assert all(found.values())


SIZES = st.sampled_from([1, 2, 7, 1000])


@MANY
@given(
    files=st.lists(
        st.lists(st.tuples(WORDS, WORDS) | st.none(), max_size=9), min_size=1, max_size=3
    ),
    sizes=st.tuples(SIZES, SIZES, SIZES),
    weight=st.sampled_from([0.3, 1, 2.5]),
    limit=st.none() | st.integers(1, 12),
    kind=st.sampled_from(["jsonl", "json"]),
)
def test_no_row_is_lost_or_doubled(files, sizes, weight, limit, kind, prepare, monkeypatch) -> None:
    """Every line of every file is a row, a duplicate, weighed out or a reject; and no size of a
    block changes which."""
    for old in Path().glob("rows-*"):
        old.unlink()
    for number, pairs in enumerate(files):
        rows = [3 if p is None else pair(*p) for p in pairs]
        content = json.dumps(rows, indent=1) if kind == "json" else "\n".join(map(json.dumps, rows))
        Path(f"rows-{number}.{kind}").write_text(content)
    source = [{"path": "rows-*", "weight": weight, "rows": limit}]
    results = []
    for block, group, window in [(1_000_000, 10_000, 1_000_000), sizes]:
        monkeypatch.setattr(readers, "BLOCK_BYTES", block)
        monkeypatch.setattr(readers, "BLOCK_ROWS", block)
        monkeypatch.setattr(prepare_data, "ROWS_PER_GROUP", group)
        monkeypatch.setattr(json_text, "WINDOW", window)
        if not any(any(pairs) for pairs in files):
            return
        write("train.jsonl", pair("always in train", "x" * 9))
        always = {"path": "train.jsonl", "into": "train"}
        stats, found = prepare(
            [*source, always], max_rejects=0.99, split={"validation": 0, "test": 0}
        )
        results.append((found, {k: v for k, v in stats.items() if k != "settings"}, rejects()))
    assert results[0] == results[1]
    counts = stats["by_source"]["rows-*"]
    flat = [p for pairs in files for p in pairs]
    usable = [p for p in flat if p is not None]
    assert counts["rows"] == min(len(usable), limit or 99)
    if limit is None or limit > len(usable):
        assert counts["rejected"] == flat.count(None)
    taken = usable[:limit]
    assert counts["duplicates"] == len(taken) - len(set(taken))
    trained = [tuple(t["content"] for t in row["messages"]) for row in found["train"]][:-1]
    if weight >= 1:
        assert counts["weighed_out"] == 0
        assert set(trained) == set(taken)
        assert all(int(weight) <= trained.count(p) <= int(weight) + 1 for p in taken)
    else:
        assert len(trained) == counts["rows"] - counts["duplicates"] - counts["weighed_out"]
        assert len(set(trained)) == len(trained)


@MANY
@given(pairs=PAIRS, order=st.randoms(use_true_random=False), cut=st.integers(0, 20))
def test_order_and_number_of_files_move_no_row(pairs, order, cut, prepare) -> None:
    split = {"validation": 0.3, "test": 0.3}
    shuffled = order.sample(pairs, len(pairs))
    found = []
    for first, second in ((pairs, []), (shuffled[:cut], shuffled[cut:])):
        write("a.jsonl", *(pair(*p) for p in first))
        write("b.jsonl", *(pair(*p) for p in second))
        try:
            found.append(contents(prepare(["b.jsonl", "a.jsonl"], split=split)[1]))
        except UserError as error:  # few rows can leave a split empty
            found.append(str(error))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved"])
def test_number_of_processes_changes_nothing(kind, prepare, monkeypatch) -> None:
    monkeypatch.setattr(parallel, "ALONE", 0)
    for module, name in ((readers, "BLOCK_BYTES"), (readers, "BLOCK_ROWS"), (places, "BLOCK_ROWS")):
        monkeypatch.setattr(module, name, 20)
    rows = [pair(p, "" if n % 11 == 0 else "Yes.") for n, p in enumerate(PROMPTS + PROMPTS[:5])]
    write("more.jsonl", *(pair(f"{p} Really?") for p in PROMPTS), "{")
    source = [
        {"path": save(rows, kind), "weight": 1.5, "rows": 250},
        {"path": "more.jsonl", "weight": 0.5},
    ]
    results = []
    for threads in (1, 2):
        results.append(
            (*prepare(source, split=SHARES, threads=threads, max_rejects=0.5), rejects())
        )
    assert results[0] == results[1]
    assert len(results[0][2]) > 20


@pytest.mark.parametrize("name", ["a.jsonl", "folder/new.jsonl"])
def test_file_that_changes_while_it_is_read(name, prepare, monkeypatch) -> None:
    Path("folder").mkdir()
    write("a.jsonl", pair("a"))
    write("folder/b.jsonl", pair("b"))
    read = prepare_data.Preparation.read

    def read_slowly(*args) -> None:
        read(*args)
        Path(name).write_text(json.dumps(pair("c", "longer")))

    monkeypatch.setattr(prepare_data.Preparation, "read", read_slowly)
    with pytest.raises(UserError, match=f"^{name} changed while the rows were read. Run again"):
        prepare(["a.jsonl", "folder"])
