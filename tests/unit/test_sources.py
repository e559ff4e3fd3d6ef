"""Sources: which text is a path and which a hub id, and where a local model lies."""

import sys

import pytest

from finetune.cli import UserError
from finetune.config import Model
from finetune.sources import (
    data_files,
    data_inputs,
    file_kind,
    is_local,
    locate_model,
    model_inputs,
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with a model, a folder that is none, a GGUF file and another file."""
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "org/name", "empty"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "notes.txt").touch()
        if folder != "empty":
            (tmp_path / folder / "config.json").touch()
    for file in ("model.gguf", "weights.safetensors"):
        (tmp_path / file).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("source", "local"),
    [
        # hub ids
        ("meta-llama/Llama-3.1-8B", False),
        ("org/na.me_1", False),
        # paths that say so, there or not
        ("./org/absent", True),
        ("../absent", True),
        ("/absent", True),
        ("~/absent", True),
        ("data/absent.jsonl", True),
        ("data/absent.csv", True),
        ("data/absent.parquet", True),
        ("models/absent.gguf", True),
        ("data/absent.jsonl.gz", True),
        ("data/absent.TSV", True),
        ("data/*.jsonl", True),
        ("data/part-*", True),
        # paths that are there
        ("model", True),
        ("org/name", True),
        ("weights.safetensors", True),
        # no id could look like these
        ("absent", True),
        ("a/b/c", True),
        ("org/na me", True),
        ("https://huggingface.co/org/name", True),
    ],
)
def test_path_or_hub_id(source, local, here) -> None:
    assert is_local(source) is local


@pytest.mark.parametrize("source", ["model", "./model", "org/name", "model.gguf"])
def test_local_model(source, here) -> None:
    assert locate_model(source).resolve() == here / source


def test_hub_model_is_elsewhere(here) -> None:
    assert locate_model("meta-llama/Llama-3.1-8B") is None


NO_MODEL = "has no config.json, so it is no Hugging Face model folder."


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "weights.safetensors",
            "weights.safetensors is a file. A model is a folder with a config.json, or a .gguf.",
        ),
        ("empty", f"empty {NO_MODEL}"),
        (
            "gpt2",
            "there is no file or folder gpt2 here (HERE). A hub model is written org/name, "
            "without a leading dot or slash.",
        ),
        (
            "./org/absent",
            "there is no file or folder ./org/absent here (HERE). A hub model is written org/name, "
            "without a leading dot or slash.",
        ),
        (
            "models/absent.gguf",
            "there is no file or folder models/absent.gguf here (HERE). A hub model is written "
            "org/name, without a leading dot or slash.",
        ),
    ],
)
def test_local_model_that_is_none(source, text, here) -> None:
    with pytest.raises(UserError) as caught:
        locate_model(source)
    assert str(caught.value) == text.replace("HERE", str(here))


@pytest.fixture
def package(here, monkeypatch):
    """An installed package `weights_of_ours`, which must not be run to be found."""
    folder = here / "site/weights_of_ours"
    (folder / "small").mkdir(parents=True)
    (folder / "bare").mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('was imported')")
    (folder / "small/config.json").touch()
    (folder / "x.gguf").touch()
    (folder / "x.bin").touch()
    monkeypatch.setattr(sys, "path", [str(here / "site"), *sys.path])
    return folder


@pytest.mark.parametrize("inner", ["small", "x.gguf"])
def test_model_inside_a_package(inner, package) -> None:
    assert locate_model(f"package:weights_of_ours/{inner}") == package / inner


def missing(name: str, reference: str) -> str:
    return (
        f"the Python package {name!r} of source `package:{reference}` is not installed here. Is it "
        "the name that is imported? What config/config.yaml wants comes with `make install`; a "
        "package of your own you install into the same environment."
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("package:not_there_at_all/x.gguf", missing("not_there_at_all", "not_there_at_all/x.gguf")),
        ("package:no-name/x.gguf", missing("no-name", "no-name/x.gguf")),
        ("package:", missing("", "")),
        (
            "package:weights_of_ours/y.gguf",
            "the Python package 'weights_of_ours' has no file 'y.gguf'.",
        ),
        ("package:weights_of_ours/bare", f"package:weights_of_ours/bare {NO_MODEL}"),
        ("package:weights_of_ours", f"package:weights_of_ours {NO_MODEL}"),
        (
            "package:weights_of_ours/x.bin",
            "package:weights_of_ours/x.bin is a file. A model is a folder with a config.json, or "
            "a .gguf.",
        ),
    ],
)
def test_package_without_that_model(source, text, package) -> None:
    with pytest.raises(UserError) as caught:
        locate_model(source)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("org/absent", []),
        ("package:weights_of_ours/x.gguf", []),
        ("model.gguf", ["model.gguf"]),
        ("model", ["model/config.json", "model/notes.txt"]),
        ("./absent.gguf", ["./absent.gguf"]),
    ],
)
def test_files_whose_change_fetches_again(source, files, here) -> None:
    assert model_inputs(Model(source=source)) == files


def test_a_chat_template_of_ones_own_is_an_input_and_hidden_files_are_none(here) -> None:
    (here / "mine.jinja").write_text("{{ messages }}")
    (here / "model" / ".cache").mkdir()
    (here / "model" / ".cache" / "lock").write_text("")
    model = Model(source="model", chat_template="mine.jinja")
    assert model_inputs(model) == ["mine.jinja", "model/config.json", "model/notes.txt"]
    assert model_inputs(Model(source="org/absent", chat_template="plain")) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.jsonl", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("a.JSON", "json"),
        ("a.csv.gz", "csv"),
        ("a.TSV.GZ", "tsv"),
        ("a.v1.2.parquet", "parquet"),
        ("a.txt", "txt"),
        ("a.md", None),
        ("a.gz", None),
        ("a.csv.zip", None),
        ("a.tar.gz", None),
        ("csv", None),
        (".csv", None),
    ],
)
def test_kind_of_a_file(name, kind) -> None:
    from pathlib import Path

    assert file_kind(Path("x.csv") / name) == kind


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder with data and other things in it, one saved by `datasets`, and links."""
    from datasets import Dataset as Rows

    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.csv.gz", "README.md", ".hidden.csv", "sub/c.tsv", ".git/d.csv"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/e.csv").touch()
    (tmp_path / "data/link.csv").symlink_to(tmp_path / "elsewhere/e.csv")
    (tmp_path / "data/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/broken.csv").symlink_to(tmp_path / "nowhere.csv")
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "only").mkdir()
    (tmp_path / "only/README.md").touch()
    (tmp_path / "odd[1].csv").touch()
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "folder.csv/f.csv").touch()
    Rows.from_dict({"text": ["a"]}).save_to_disk("saved")
    (tmp_path / "saved/cache-0123.arrow").touch()
    return tmp_path


FOLDER = [
    *("data/a.csv.gz", "data/b.jsonl"),
    "data/broken.csv",  # a link to nothing: an error is better than a gap in the data
    "data/link.csv",
    *("data/linked/e.csv", "data/sub/c.tsv"),
]


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("data", FOLDER),
        ("data/", FOLDER),
        ("linked", ["linked/e.csv"]),
        ("folder.csv", ["folder.csv/f.csv"]),
        ("data/*.csv*", ["data/a.csv.gz", "data/broken.csv", "data/link.csv"]),
        ("data/**/*.tsv", ["data/sub/c.tsv"]),
        ("data/?.jsonl", ["data/b.jsonl"]),
        ("data/*", ["data/README.md", *FOLDER[:4]]),
        ("odd[1].csv", ["odd[1].csv"]),
        (
            "saved",
            ["saved/data-00000-of-00001.arrow", "saved/dataset_info.json", "saved/state.json"],
        ),
        # what is not there is left for others to complain about
        ("data/*.parquet", ["data/*.parquet"]),
        ("absent.csv", ["absent.csv"]),
        ("only", ["only"]),
    ],
)
def test_files_behind_a_path(path, files, data) -> None:
    assert data_files(path) == files


def test_files_whose_change_prepares_again(data) -> None:
    paths = ["odd[1].csv", "data/*.jsonl", "org/name", "linked"]
    assert data_inputs(paths) == ["odd[1].csv", "data/b.jsonl", "linked/e.csv"]
