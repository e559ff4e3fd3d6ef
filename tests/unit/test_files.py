"""Files: one that exists is complete, and a failure leaves what was there before."""

import hashlib
import json

import pytest

from finetune.files import (
    MANIFEST,
    complete_directory,
    digest_file,
    digest_json,
    read_json,
    write_aside,
    write_json,
)


def names_in(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_file_appears_when_the_block_ends(tmp_path) -> None:
    with write_aside(tmp_path / "deep/er/x.txt") as aside:
        aside.write_text("new")
        assert aside.parent == tmp_path / "deep/er"  # the same file system: a rename is atomic
        assert not (tmp_path / "deep/er/x.txt").exists()
    assert names_in(tmp_path) == ["deep", "deep/er", "deep/er/x.txt"]
    assert (tmp_path / "deep/er/x.txt").read_text() == "new"


def fail_in(context, error: type[BaseException]) -> None:
    """A job that writes something and then ends with this error."""
    with context as aside:
        (aside / "half" if aside.is_dir() else aside).write_text("half")
        raise error


@pytest.mark.parametrize("context", [write_aside, complete_directory])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_output_of_a_failed_block_never_appears(context, error, tmp_path) -> None:
    with pytest.raises(error):
        fail_in(context(tmp_path / "x"), error)
    assert names_in(tmp_path) == []


def test_earlier_file_outlives_a_failed_block(tmp_path) -> None:
    (tmp_path / "x.txt").write_text("old")
    with pytest.raises(RuntimeError):
        fail_in(write_aside(tmp_path / "x.txt"), RuntimeError)
    assert names_in(tmp_path) == ["x.txt"]
    assert (tmp_path / "x.txt").read_text() == "old"


def test_block_that_writes_nothing_is_an_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError), write_aside(tmp_path / "x.txt"):
        pass
    assert names_in(tmp_path) == []


def test_directory_appears_whole_with_its_manifest(tmp_path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"12345")
    with complete_directory(tmp_path / "out/model") as folder:
        (folder / "deep").mkdir()
        (folder / "deep/a.txt").write_text("été", encoding="utf-8")
        (folder / "empty").touch()
        (folder / "weights.bin").symlink_to(tmp_path / "weights.bin")
        assert not (tmp_path / "out/model").exists()
    assert names_in(tmp_path / "out") == [
        "model",
        "model/deep",
        "model/deep/a.txt",
        "model/empty",
        "model/manifest.json",
        "model/weights.bin",
    ]
    assert read_json(tmp_path / "out/model" / MANIFEST) == {
        "deep/a.txt": 5,
        "empty": 0,
        "weights.bin": 5,
    }


def test_earlier_directory_outlives_a_failed_block(tmp_path) -> None:
    with complete_directory(tmp_path / "model") as folder:
        (folder / "old").touch()
    with pytest.raises(RuntimeError):
        fail_in(complete_directory(tmp_path / "model"), RuntimeError)
    assert names_in(tmp_path) == ["model", "model/manifest.json", "model/old"]


def test_new_directory_takes_the_place_of_the_old_one(tmp_path) -> None:
    for name in ("old", "new"):
        with complete_directory(tmp_path / "model") as folder:
            (folder / name).touch()
    assert names_in(tmp_path) == ["model", "model/manifest.json", "model/new"]
    assert read_json(tmp_path / "model" / MANIFEST) == {"new": 0}


def test_leftovers_of_a_killed_job_are_not_published(tmp_path) -> None:
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial/left over").touch()
    with complete_directory(tmp_path / "model") as folder:
        (folder / "new").touch()
    assert names_in(tmp_path) == ["model", "model/manifest.json", "model/new"]


def test_json_is_readable_by_people_and_machines(tmp_path) -> None:
    write_json(tmp_path / "x.json", {"ü": [1, 2.5, None]})
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert text == '{\n  "ü": [\n    1,\n    2.5,\n    null\n  ]\n}\n'
    assert read_json(tmp_path / "x.json") == {"ü": [1, 2.5, None]}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, "\ud800"], ids=repr)
def test_json_that_others_could_not_read_is_an_error(value, tmp_path) -> None:
    with pytest.raises((ValueError, TypeError)):
        write_json(tmp_path / "x.json", {"loss": value})
    assert names_in(tmp_path) == []


def test_digest_of_a_value_does_not_depend_on_key_order() -> None:
    one = digest_json({"a": 1, "b": {"c": 2, "d": 3}})
    assert one == digest_json(json.loads('{"b": {"d": 3, "c": 2}, "a": 1}'))
    assert one != digest_json({"a": 1, "b": {"c": 2, "d": 4}})
    assert digest_json([1, 2]) != digest_json([2, 1])


@pytest.mark.parametrize("content", [b"", b"abc", b"x" * 3_000_000])
def test_digest_of_a_file_is_its_sha256(content, tmp_path) -> None:
    (tmp_path / "x").write_bytes(content)
    assert digest_file(tmp_path / "x") == hashlib.sha256(content).hexdigest()
