"""Rule prepare_data: from odd files to canonical rows, exact counts, and clear refusals."""

import hashlib
import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from datasets.exceptions import DatasetNotFoundError

import prepare_data
from finetune.cli import UserError
from finetune.config import Dataset
from finetune.splits import SPLITS, choose_split
from finetune.stages import prepare_settings

ALL_TRAIN = {"validation": 0, "test": 0}
PROMPTS = [f"What is {n} + {n}?" for n in range(300)]


def pair(prompt: str, completion: str = "Yes.", **more: object) -> dict:
    return {"prompt": prompt, "completion": completion} | more


def canonical(prompt: str, completion: str = "Yes.") -> list[dict]:
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": completion},
    ]


def jsonl(*rows: object) -> str:
    """Rows as JSON lines; a text is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return "".join(f"{line}\n" for line in lines)


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """Run the rule's script in an empty folder; the stats and the rows of each split."""
    monkeypatch.chdir(tmp_path)

    def run(source, split=ALL_TRAIN, **keys):
        dataset = Dataset(source=source, split=split, **keys)
        settings = json.dumps(prepare_settings(dataset))
        monkeypatch.setattr(sys, "argv", ["x", "--settings", settings, "--output", "out"])
        prepare_data.main()
        rows = {s: pq.read_table(tmp_path / f"out/{s}.parquet").to_pylist() for s in SPLITS}
        return json.loads((tmp_path / "out/stats.json").read_text()), rows

    return run


def refused(prepare, *args, **keys) -> str:
    with pytest.raises(UserError) as caught:
        prepare(*args, **keys)
    return str(caught.value)


def test_rows_in_one_shape_with_the_place_they_came_from(prepare, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(pair("one", n=1), "", pair("two")))
    (tmp_path / "b.csv").write_text('prompt,completion\n"th\nree",3\nfour,4\n')
    _, rows = prepare(["a.jsonl", "b.csv"])
    assert rows["train"] == [
        {"id": "a.jsonl:1", "messages": canonical("one")},
        {"id": "a.jsonl:3", "messages": canonical("two")},
        {"id": "b.csv:2", "messages": canonical("th\nree", "3")},
        {"id": "b.csv:4", "messages": canonical("four", "4")},
    ]
    assert rows["validation"] == rows["test"] == []
    schema = pq.read_schema(tmp_path / "out/test.parquet")
    assert schema.equals(prepare_data.SCHEMA)
    assert (tmp_path / "out/rejects.jsonl").read_text() == ""


def test_stats_hold_counts_digests_and_settings(prepare, tmp_path) -> None:
    text = jsonl(pair("one"), pair("one"), pair("two"), "{", pair(""))
    (tmp_path / "a.jsonl").write_text(text)
    stats, _ = prepare("a.jsonl", max_rejects=0.5)
    assert stats == {
        "rows": {"train": 2, "validation": 0, "test": 0},
        "duplicates": 1,
        "rejected": {
            "not JSON: Expecting property name enclosed in double quotes": 1,
            "prompt is empty": 1,
        },
        "sources": {"a.jsonl": hashlib.sha256(text.encode()).hexdigest()},
        "settings": {
            "source": ["a.jsonl"],
            "subset": None,
            "revision": None,
            "format": None,
            "columns": {},
            "split": {"validation": 0, "test": 0, "group": None, "seed": 0},
            "max_rejects": 0.5,
        },
    }


def test_what_is_said_at_the_end(prepare, tmp_path, capsys) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(pair("one"), pair("one"), pair("two"), "{"))
    prepare("a.jsonl", max_rejects=0.5)
    assert capsys.readouterr().err == (
        "prepare_data: 2 train, 0 validation, 0 test rows; left out: 1 duplicates, 1 rejected\n"
    )


def test_every_reject_is_written_with_its_place_and_reason(prepare, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(pair("one"), '{"prompt": "é', pair("two", None)))
    (tmp_path / "b.csv").write_text("prompt,completion\nthree\n")
    prepare(["a.jsonl", "b.csv"], max_rejects=0.9)
    assert [json.loads(x) for x in (tmp_path / "out/rejects.jsonl").read_text().splitlines()] == [
        {"source": "a.jsonl", "line": 2, "reason": "not JSON: Invalid control character at"},
        {"source": "a.jsonl", "line": 3, "reason": "completion is missing"},
        {"source": "b.csv", "line": 2, "reason": "another number of fields than the header"},
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", jsonl({"messages": canonical("Hi.")})),
        ("a.jsonl", jsonl({"messages": json.dumps(canonical("Hi."))})),
        ("a.csv", '\ufeffmessages\n"' + json.dumps(canonical("Hi.")).replace('"', '""') + '"\n'),
        ("a.csv", "completion,note,prompt\nYes.,x,Hi.\n"),
    ],
)
def test_one_conversation_in_many_forms(name, content, prepare, tmp_path) -> None:
    (tmp_path / name).write_text(content)
    _, rows = prepare(name)
    assert rows["train"] == [
        {"id": f"{name}:{2 if name == 'a.csv' else 1}", "messages": canonical("Hi.")}
    ]


def test_columns_of_the_user(prepare, tmp_path) -> None:
    (tmp_path / "a.csv").write_text("q,a,prompt\nHi.,Yes.,other\n")
    _, rows = prepare("a.csv", columns={"prompt": "q", "completion": "a"})
    assert rows["train"][0]["messages"] == canonical("Hi.")


def test_format_chosen_where_the_columns_fit_both(prepare, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(pair("Hi.", messages=canonical("other"))))
    assert refused(prepare, "a.jsonl") == (
        "a.jsonl fits messages and prompt-completion (columns: prompt, completion, messages); "
        "set `format`."
    )
    _, rows = prepare("a.jsonl", format="prompt-completion")
    assert rows["train"][0]["messages"] == canonical("Hi.")


def test_format_of_the_first_row_holds_for_all(prepare, tmp_path) -> None:
    rows = ["{", pair("one"), {"messages": canonical("two")}]
    (tmp_path / "a.jsonl").write_text(jsonl(*rows))
    stats, _ = prepare("a.jsonl", max_rejects=0.9)
    assert stats["rejected"] == {
        "not JSON: Expecting property name enclosed in double quotes": 1,
        "prompt is missing": 1,
    }


def test_duplicates_over_files_and_formats_keep_the_first(prepare, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(pair("one"), pair("two")))
    (tmp_path / "b.csv").write_text("prompt,completion\ntwo,Yes.\ntwo,No.\none,Yes.\n")
    stats, rows = prepare(["a.jsonl", "b.csv"])
    assert [row["id"] for row in rows["train"]] == ["a.jsonl:1", "a.jsonl:2", "b.csv:3"]
    assert stats["duplicates"] == 2


# refusals


def test_too_many_rejects_stop_with_the_commonest_reasons_and_an_example_of_each(
    prepare, tmp_path
) -> None:
    bad = [pair(""), "{", pair("", "x"), pair("a", 3), "[]", pair(" "), "[1]", "x"]
    (tmp_path / "a.jsonl").write_text(jsonl(pair("one"), *bad, pair("two"), pair("two")))
    assert refused(prepare, "a.jsonl", max_rejects=0.25) == (
        "8 of 11 rows cannot be used, more than max_rejects 25.00% allows: "
        "3 x prompt is empty (e.g. a.jsonl:2); 2 x not a JSON object (e.g. a.jsonl:6); "
        "1 x not JSON: Expecting property name enclosed in double quotes (e.g. a.jsonl:3). "
        "Mend them, or raise max_rejects under the dataset to leave them out."
    )


@pytest.mark.parametrize(("bad", "works"), [(0, True), (1, True), (2, False)])
def test_max_rejects_is_a_share_of_all_rows(bad, works, prepare, tmp_path) -> None:
    rows = ["{"] * bad + [pair(f"row {n}") for n in range(1000 - bad)]
    (tmp_path / "a.jsonl").write_text(jsonl(*rows))
    if works:
        assert sum(prepare("a.jsonl")[0]["rejected"].values()) == bad
    else:
        text = refused(prepare, "a.jsonl")
        assert text.startswith("2 of 1000 rows cannot be used, more than max_rejects 0.10% allows")


def test_not_one_reject_where_none_is_allowed(prepare, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(pair("one"), "{"))
    text = refused(prepare, "a.jsonl", max_rejects=0)
    assert text.startswith("1 of 2 rows cannot be used, more than max_rejects 0.00% allows")


@pytest.mark.parametrize(
    ("rows", "split", "text"),
    [
        (
            0,
            {"validation": 0.1, "test": 0.1},
            "the train split is empty (0 rows in all). Give more rows, another split.seed, or "
            "smaller shares to the others.",
        ),
        (
            3,
            {"validation": 0.0001, "test": 0},
            "the validation split is empty (3 rows in all). Give more rows, another split.seed, "
            "or a larger share (validation: 0 if you want none).",
        ),
        (
            3,
            {"validation": 0, "test": 0.0001},
            "the test split is empty (3 rows in all). Give more rows, another split.seed, or a "
            "larger share.",
        ),
        (
            3,
            {"validation": 0, "test": 0.9999},
            "the train split is empty (3 rows in all). Give more rows, another split.seed, or "
            "smaller shares to the others.",
        ),
    ],
)
def test_empty_split(rows, split, text, prepare, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(*(pair(f"row {n}") for n in range(rows))))
    assert refused(prepare, "a.jsonl", split=split) == text


def test_group_column_that_a_row_lacks(prepare, tmp_path) -> None:
    rows = [pair("one", user="a"), pair("two", usr="a")]
    (tmp_path / "a.jsonl").write_text(jsonl(*rows))
    assert refused(prepare, "a.jsonl", split=ALL_TRAIN | {"group": "user"}) == (
        "a.jsonl:2: split.group names 'user', but columns are prompt, completion, usr"
    )


def test_failure_leaves_what_was_there(prepare, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(pair("one")))
    prepare("a.jsonl")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "a.jsonl").write_text(jsonl(pair("two"), "{"))
    refused(prepare, "a.jsonl")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_first_failure_leaves_nothing(prepare, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl("{"))
    refused(prepare, "a.jsonl")
    assert list((tmp_path / "out").iterdir()) == []


def test_script_ends_with_one_line(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(pair("one"), "{"))
    settings = json.dumps(prepare_settings(Dataset(source="a.jsonl")))
    command = [sys.executable, prepare_data.__file__, "--settings", settings, "--output", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == (
        "ERROR prepare_data: 1 of 2 rows cannot be used, more than max_rejects 0.10% allows: "
        "1 x not JSON: Expecting property name enclosed in double quotes (e.g. a.jsonl:2). "
        "Mend them, or raise max_rejects under the dataset to leave them out.\n"
    )
    assert "Traceback" not in done.stderr


# splits

SHARES = {"validation": 0.2, "test": 0.3, "seed": 4}


def prompts_by_split(rows: dict) -> dict[str, str]:
    return {row["messages"][0]["content"]: split for split in rows for row in rows[split]}


def test_split_depends_on_the_text_alone(prepare, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(*map(pair, PROMPTS)))
    _, rows = prepare("a.jsonl", split=SHARES)
    chosen = prompts_by_split(rows)
    key = json.dumps(canonical(PROMPTS[0]), sort_keys=True)
    assert chosen[PROMPTS[0]] == choose_split(key, 4, 0.2, 0.3)
    assert {split: len(rows[split]) for split in SPLITS} == {
        split: list(chosen.values()).count(split) for split in SPLITS
    }
    turned = "".join(f'{p},x,"Yes."\n' for p in reversed(PROMPTS))
    (tmp_path / "b.csv").write_text("prompt,note,completion\n" + turned)
    assert prompts_by_split(prepare("b.csv", split=SHARES)[1]) == chosen


def test_added_rows_move_no_old_one(prepare, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(*map(pair, PROMPTS[:200])))
    before = prompts_by_split(prepare("a.jsonl", split=SHARES)[1])
    (tmp_path / "a.jsonl").write_text(jsonl(*map(pair, PROMPTS[200:] + PROMPTS[:200])))
    after = prompts_by_split(prepare("a.jsonl", split=SHARES)[1])
    assert len(after) == 300
    assert before.items() <= after.items()


def test_rows_of_a_group_stay_together(prepare, tmp_path) -> None:
    groups = {prompt: n % 30 for n, prompt in enumerate(PROMPTS)}
    (tmp_path / "a.jsonl").write_text(jsonl(*(pair(p, user=g) for p, g in groups.items())))
    chosen = prompts_by_split(prepare("a.jsonl", split=SHARES | {"group": "user"})[1])
    homes = {(group, chosen[prompt]) for prompt, group in groups.items()}
    assert len(homes) == 30
    assert {split for _, split in homes} == set(SPLITS)


@pytest.mark.parametrize("group", [None, "a\ud800", {"id": 1}, True], ids=repr)
def test_group_may_be_named_anything(group, prepare, tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(*(pair(p, user=group) for p in PROMPTS[:20])))
    split = choose_split(f"group {group}", 0, 0.5, 0)
    keys = {"validation": 0.5, "test": 0, "group": "user"}
    if split == "train":
        assert refused(prepare, "a.jsonl", split=keys).startswith("the validation split is empty")
    else:
        assert refused(prepare, "a.jsonl", split=keys).startswith("the train split is empty")


def test_many_rows_are_written_in_parts_and_in_order(prepare, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(prepare_data, "ROWS_PER_WRITE", 7)
    (tmp_path / "a.jsonl").write_text(jsonl(*map(pair, PROMPTS[:24])))
    _, rows = prepare("a.jsonl")
    assert [row["id"] for row in rows["train"]] == [f"a.jsonl:{n}" for n in range(1, 25)]
    assert pq.ParquetFile(tmp_path / "out/train.parquet").num_row_groups == 4


# the hub


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds one dataset; the arguments it was asked with."""
    asked = []

    def serve(**splits):
        def load_dataset(*args, **keys):
            asked.append((args, keys))
            return splits

        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        return asked

    return serve


def rows_named(name: str, count: int) -> list[dict]:
    return [pair(f"{name} {n}") for n in range(count)]


def test_hub_dataset_with_one_split_is_split_here(prepare, hub) -> None:
    asked = hub(train=rows_named("row", 300))
    stats, rows = prepare("org/name", split=SHARES, subset="en", revision="v1")
    assert asked == [(("org/name", "en"), {"revision": "v1"})]
    key = json.dumps(canonical("row 7"), sort_keys=True)
    assert prompts_by_split(rows)["row 7"] == choose_split(key, 4, 0.2, 0.3)
    assert all(rows[split] for split in SPLITS)
    assert rows["train"][0]["id"].startswith("org/name/train:")
    assert stats["sources"] == {}  # digests are of local files


def test_given_test_split_stays_whole_and_validation_comes_from_train(prepare, hub) -> None:
    hub(test=rows_named("test", 40), train=rows_named("train", 200))
    _, rows = prepare("org/name", split=SHARES)
    names = {s: {row["messages"][0]["content"].split()[0] for row in rows[s]} for s in SPLITS}
    assert names == {"train": {"train"}, "validation": {"train"}, "test": {"test"}}
    assert [row["id"] for row in rows["test"]] == [f"org/name/test:{n}" for n in range(1, 41)]
    assert len(rows["train"]) + len(rows["validation"]) == 200
    assert 20 <= len(rows["validation"]) <= 60


def test_all_three_given_splits_are_kept_whatever_the_shares(prepare, hub) -> None:
    given = {"train": 5, "validation": 3, "test": 2}
    hub(**{split: rows_named(split, count) for split, count in given.items()})
    assert prepare("org/name", split=ALL_TRAIN)[0]["rows"] == given


def test_row_that_train_shares_with_a_given_split_is_left_out_of_train(prepare, hub) -> None:
    hub(
        train=[pair("leak"), pair("one"), pair("two")],
        test=[pair("leak")],
        validation=[pair("one")],
    )
    stats, rows = prepare("org/name")
    assert prompts_by_split(rows) == {"two": "train", "one": "validation", "leak": "test"}
    assert stats["duplicates"] == 2


def test_splits_with_other_names_are_not_dropped_in_silence(prepare, hub, capsys) -> None:
    hub(train=rows_named("train", 2), dev=rows_named("dev", 2), extra=rows_named("extra", 2))
    assert prepare("org/name")[0]["rows"] == {"train": 2, "validation": 0, "test": 0}
    assert capsys.readouterr().err.splitlines()[0] == (
        "prepare_data: org/name has other splits, which are left out: dev, extra"
    )


def test_hub_dataset_without_training_rows(prepare, hub) -> None:
    hub(test=rows_named("test", 2), dev=rows_named("dev", 2))
    assert refused(prepare, "org/name") == "org/name has no train split, only: test, dev"


def test_hub_dataset_that_is_not_there(prepare, monkeypatch) -> None:
    def load_dataset(*_, **__):
        raise DatasetNotFoundError("Dataset 'org/name' doesn't exist on the Hub.")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert refused(prepare, "org/name") == (
        "the hub has no dataset 'org/name' that you may read: "
        "Dataset 'org/name' doesn't exist on the Hub."
    )


def test_hub_rows_that_cannot_be_used_name_their_split(prepare, hub, tmp_path) -> None:
    hub(train=[*rows_named("row", 3), pair("")])
    prepare("org/name", max_rejects=0.5)
    assert json.loads((tmp_path / "out/rejects.jsonl").read_text()) == {
        "source": "org/name/train",
        "line": 4,
        "reason": "prompt is empty",
    }


def test_real_loader_on_a_folder(tmp_path, monkeypatch) -> None:
    """What `datasets` itself makes of a dataset's files."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text(jsonl(*rows_named("train", 3)))
    (folder / "test.jsonl").write_text(jsonl(*rows_named("test", 2)))
    rows = list(prepare_data.hub_rows(str(folder), None, None))
    assert [(open_splits, number, row["prompt"]) for _, open_splits, number, row in rows] == [
        (("test",), 1, "test 0"),
        (("test",), 2, "test 1"),
        (("train", "validation"), 1, "train 0"),
        (("train", "validation"), 2, "train 1"),
        (("train", "validation"), 3, "train 2"),
    ]
