"""Which code, packages and machine made a result."""

import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from finetune import provenance
from finetune.provenance import code_commit, package_versions


def git(folder, *args):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *args], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """The workflow's code in a repository of one commit."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "provenance.py").write_text("x = 1\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "one")
    monkeypatch.setattr(provenance, "__file__", str(folder / "provenance.py"))
    return folder


def test_the_commit_is_whole(repository):
    assert code_commit() == git(repository, "rev-parse", "HEAD")


@pytest.mark.parametrize("annotated", [[], ["-m", "release"]])
def test_a_tag_does_not_stand_in_for_the_commit(repository, annotated):
    git(repository, "tag", "v1.0", *annotated)
    assert code_commit() == git(repository, "rev-parse", "HEAD")
    git(repository, "commit", "--quiet", "--allow-empty", "-m", "two")
    assert code_commit() == git(repository, "rev-parse", "HEAD")


def test_changed_files_are_said(repository):
    (repository / "new.py").write_text("y = 1\n")  # git does not know it: no change
    assert code_commit() == git(repository, "rev-parse", "HEAD")
    (repository / "provenance.py").write_text("x = 2\n")
    assert code_commit() == git(repository, "rev-parse", "HEAD") + "-dirty"


def test_outside_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert code_commit() is None


def test_without_git_there_is_no_commit(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert code_commit() is None


def test_versions_are_those_installed():
    versions = package_versions()
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["torch"] == version("torch")
    names = {"torch", "transformers", "datasets", "peft", "bitsandbytes", "accelerate"}
    assert set(versions) == names | {"python", "deepspeed", "tokenizers"}
    assert all(re.match(r"\d+\.\d+", text) for text in versions.values())
