"""Places: files, saved folders and hub datasets, each row with its place, split and class names."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import ClassLabel, DatasetDict, Features, List, Value
from datasets import Dataset as Rows
from datasets.exceptions import DatasetNotFoundError
from datasets.packaged_modules.generator.generator import Generator

from finetune import places
from finetune.cli import UserError
from finetune.config import Dataset
from finetune.places import open_places
from finetune.stages import prepare_settings


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def texts(*names: str) -> Rows:
    return Rows.from_dict({"text": list(names)})


def opened(source: object) -> list[tuple]:
    """(name, into, place and number of each row, the text or whole row) of each place."""
    found = open_places(prepare_settings(Dataset(source=source))["source"], "line")
    return [
        (
            place.name,
            place.into,
            [(f"{b.place}:{n}", row.get("text", row)) for b in place.blocks for n, row in b.rows()],
        )
        for place in found
    ]


def refusal(source: object) -> str:
    with pytest.raises(UserError) as caught:
        opened(source)
    return str(caught.value)


# files


def test_files_of_a_folder_and_of_patterns() -> None:
    Path("a").mkdir()
    Path("a/x.txt").write_text("one\n\ntwo")
    Path("a/y.txt").write_text("three")
    x = ("a", None, [("a/x.txt:1", "one"), ("a/x.txt:3", "two")])
    assert opened("a") == [x, ("a", None, [("a/y.txt:1", "three")])]
    pattern = opened([{"path": "a/x*", "into": "train"}, "a/x.txt"])
    assert pattern == [
        ("a/x*", "train", x[2]),
        ("a/x.txt", None, x[2]),
    ]


def test_held_out_files_come_first_and_test_before_validation() -> None:
    for name in "abcd":
        Path(f"{name}.txt").write_text(name)
    into = {"a": None, "b": "validation", "c": "train", "d": "test"}
    found = opened([{"path": f"{name}.txt", "into": split} for name, split in into.items()])
    assert [(name, split) for name, split, _ in found] == [
        ("d.txt", "test"),
        ("b.txt", "validation"),
        ("a.txt", None),
        ("c.txt", "train"),
    ]


def test_no_files() -> None:
    Path("empty").mkdir()
    assert refusal("absent.csv").startswith("there is no file absent.csv here (")
    assert refusal("x/*.csv").startswith("there is no file x/*.csv here (")
    assert refusal("./empty").startswith("empty holds no files of rows; known: jsonl, json, csv")


def test_text_files_beside_others_are_not_trained_on_unasked() -> None:
    Path("a").mkdir()
    for name in ("README.txt", "b.jsonl", "c.csv"):
        Path("a", name).touch()
    assert refusal("a/") == (
        "a/ holds .txt files among others. A README would be trained on: name the files, e.g. "
        "`source: a/*.csv`"
    )


def test_file_name_that_is_no_text(tmp_path) -> None:
    Path(os.fsdecode(b"a\xff.txt")).write_text("x")
    assert refusal("*.txt") == "the file name 'a\\udcff.txt' is not UTF-8; rename the file"
    Path(os.fsdecode(b"a\xff.txt")).rename("aü.txt")
    assert opened("*.txt") == [("*.txt", None, [("aü.txt:1", "x")])]


# saved folders


def save_splits() -> None:
    splits = {
        "train": texts("a", "b"),
        "test": texts("c"),
        "validation": texts("d"),
        "extra": texts("e"),
    }
    DatasetDict(splits).save_to_disk("saved")


def test_splits_of_a_saved_folder_are_kept(capsys) -> None:
    save_splits()
    assert opened("saved") == [
        ("saved", "test", [("saved/test:1", "c")]),
        ("saved", "validation", [("saved/validation:1", "d")]),
        ("saved", None, [("saved/train:1", "a"), ("saved/train:2", "b")]),
    ]
    expected = "saved has other splits, which are left out: extra\n"
    assert capsys.readouterr().err.endswith(expected)


@pytest.mark.parametrize(
    ("keys", "into"),
    [
        ({"split": "extra"}, None),
        ({"split": "extra", "into": "train"}, "train"),
        ({"split": "test"}, "test"),
        ({"split": "test", "into": "train"}, "train"),
        ({"split": "train", "into": "validation"}, "validation"),
    ],
    ids=str,
)
def test_split_that_is_named(keys, into) -> None:
    save_splits()
    [(name, found, rows)] = opened({"path": "saved"} | keys)
    assert (name, found) == (f"saved/{keys['split']}", into)
    assert rows[0][0] == f"saved/{keys['split']}:1"


def test_into_takes_all_splits() -> None:
    save_splits()
    found = opened({"path": "saved", "into": "train"})
    assert [(into, len(rows)) for _, into, rows in found] == [
        ("train", 2),
        ("train", 1),
        ("train", 1),
    ]


def test_saved_without_splits() -> None:
    texts("a").save_to_disk("saved")
    assert opened("./saved") == [("./saved", None, [("./saved:1", "a")])]
    assert refusal({"path": "saved", "split": "train"}) == (
        "saved has no split 'train', only: rows without one"
    )


def test_saved_without_the_split() -> None:
    DatasetDict({"en": texts("a"), "de": texts("b")}).save_to_disk("saved")
    assert refusal({"path": "saved", "split": "fr"}) == "saved has no split 'fr', only: en, de"
    assert refusal("saved") == (
        "saved has no train split, only: en, de. Name one and where it goes: "
        "`source: {path: saved, split: en, into: train}`"
    )


def test_rows_that_were_chosen_before_saving_and_blocks(monkeypatch) -> None:
    monkeypatch.setattr(places, "BLOCK_ROWS", 3)
    Rows.from_dict({"text": [f"{n}" for n in range(20)]}).select(range(4, 12)).save_to_disk("saved")
    [(_, _, rows)] = opened("saved")
    assert rows == [(f"saved:{n - 3}", f"{n}") for n in range(4, 12)]


def test_classes_have_their_names() -> None:
    names = ClassLabel(names=["no", "yes"])
    rows = {"text": ["a"] * 4, "label": [1, 0, None, -1], "n": [1] * 4, "inside": [[1]] * 4}
    features = Features(
        {"text": Value("string"), "label": names, "n": Value("int32"), "inside": List(names)}
    )
    Rows.from_dict(rows, features=Features(features)).save_to_disk("saved")
    place, *_ = open_places(prepare_settings(Dataset(source="saved"))["source"], "line")
    found = [row for block in place.blocks for _, row in block.rows()]
    assert [row["label"] for row in found] == ["yes", "no", None, None]
    assert list(found[0]) == ["text", "label", "n", "inside"]
    assert found[0]["inside"] == [1]  # no column of ours can name it


def test_keys_that_arrow_fills_in_are_gone() -> None:
    turns = [
        {"role": "user", "content": "a", "weight": None},
        {"role": "assistant", "content": "b", "weight": 1},
    ]
    Rows.from_dict({"messages": [turns]}).save_to_disk("saved")
    [(_, _, [(_, row)])] = opened("saved")
    assert row == {"messages": [{"role": "user", "content": "a"}, turns[1]]}


# the hub


COMMIT = "0123456789" * 4


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds one dataset; the arguments it was asked with."""
    asked = []

    def serve(answer: object) -> list:
        def load_dataset_builder(*args, **keys):
            asked.append((args, keys))
            if isinstance(answer, Exception):
                raise answer
            steps = {"download_and_prepare": lambda: None, "as_dataset": lambda: answer}
            return SimpleNamespace(hash=COMMIT, **steps)

        monkeypatch.setattr("datasets.load_dataset_builder", load_dataset_builder)
        return asked

    return serve


def test_hub_dataset(hub) -> None:
    asked = hub(DatasetDict({"train": texts("a"), "test": texts("b")}))
    found = opened({"path": "org/name", "subset": "en", "revision": "v1"})
    assert asked == [(("org/name", "en"), {"revision": "v1"})]
    assert found == [
        ("org/name/en", "test", [("org/name/en/test:1", "b")]),
        ("org/name/en", None, [("org/name/en/train:1", "a")]),
    ]


@pytest.fixture
def cached(tmp_path, monkeypatch) -> None:
    """The cache that a download from the hub leaves; tests run offline."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    on_the_hub = {"repo_id": "org/name", "dataset_name": "name", "hash": COMMIT}
    rows = Generator(generator=lambda: iter(texts("a")), config_id="default", **on_the_hub)
    rows.download_and_prepare()


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("revision", [None, COMMIT])
def test_commit_of_a_hub_dataset(revision, capsys) -> None:
    """The real loader."""
    entry = {"path": "org/name", "revision": revision}
    [place] = open_places(prepare_settings(Dataset(source=entry))["source"], "line")
    assert (place.name, place.commit) == ("org/name", COMMIT)
    assert [row for block in place.blocks for _, row in block.rows()] == [{"text": "a"}]
    said = f"org/name comes from the cache, not from the hub: commit {COMMIT}\n"
    assert (said in capsys.readouterr().err) == (revision is None)


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("revision", ["v1", COMMIT[:7], COMMIT[::-1]])
def test_cache_that_holds_another_commit_or_one_that_cannot_be_told(revision) -> None:
    assert refusal({"path": "org/name", "revision": revision}) == (
        f"org/name comes from the cache, not from the hub, and the newest commit there, {COMMIT}, "
        f"may not be revision {revision!r}. Run once on a host with a network, or set `revision: "
        f"{COMMIT}`."
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            DatasetNotFoundError("Revision 'v9' doesn't exist for dataset 'org/name' on the Hub."),
            "the hub does not give 'org/name': Revision 'v9' doesn't exist for dataset 'org/name' "
            "on the Hub. Check the spelling and `revision`, or run `hf auth login`.",
        ),
        (
            ValueError("Config name is missing. Pick one among: ['de', 'en']"),
            "org/name with subset None: Config name is missing. Pick one among: ['de', 'en']",
        ),
        (
            ConnectionError("Couldn't reach 'org/name' on the Hub"),
            "the dataset org/name is not in the Hugging Face cache, and HF_HUB_OFFLINE is set "
            "(ConnectionError). Fetch it on a host with a network, or give a local path as "
            "`source`.",
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_hub_says_no(error, text, hub) -> None:
    hub(error)
    assert refusal("org/name") == text


def test_what_datasets_makes_of_a_folder(tmp_path, monkeypatch) -> None:
    """The real loader, on files as they are on the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (folder / "test.jsonl").write_text('{"text": "c"}\n')
    loaded = places.load_hub({"path": str(folder), "subset": None, "revision": None})
    monkeypatch.setattr(places, "load_hub", lambda source: loaded)
    assert opened("org/name") == [
        ("org/name", "test", [("org/name/test:1", "c")]),
        ("org/name", None, [("org/name/train:1", "a"), ("org/name/train:2", "b")]),
    ]


@pytest.mark.parametrize(
    ("name", "into"),
    [
        ("test.jsonl", "test"),
        ("TEST.csv.gz", "test"),
        ("test-00000-of-00002.parquet", "test"),
        ("test_1.jsonl", "test"),
        ("dev.jsonl", "validation"),
        ("val.tsv", "validation"),
        ("validation-00001-of-00002.parquet", "validation"),
        # like the train split of a hub dataset: by hash into the splits that nothing brings
        ("train.jsonl", None),
        ("test/part-0.jsonl", "test"),
        ("dev/1/test_prompts.jsonl", "validation"),
        ("testimony.csv", None),
        ("test_prompts.csv", None),
        ("latest.csv", None),
    ],
)
def test_split_in_the_name_of_a_file(name, into) -> None:
    assert places.split_in_path(f"a/{name}", "a") == into


def test_folder_with_splits_of_its_own() -> None:
    Path("folder").mkdir()
    for name in ("train", "test", "dev", "more"):
        Path("folder", f"{name}.jsonl").write_text(f'{{"text": "{name}"}}')
    found = [(into, text) for _, into, [(_, text)] in opened("folder")]
    assert found == [("test", "test"), ("validation", "dev"), (None, "more"), (None, "train")]


def test_other_files_of_a_folder_are_named(capsys) -> None:
    Path("folder").mkdir()
    Path("folder/a.jsonl").write_text('{"text": "a"}')
    assert len(opened("folder")) == 1
    assert capsys.readouterr().err == ""
    for name in ("b.jsonl.zst", "README.md", "c.csv"):
        Path("folder", name).touch()
    assert len(opened("folder")) == 2
    assert capsys.readouterr().err == (
        "folder: left out, since they are no files of rows: README.md, b.jsonl.zst\n"
    )
