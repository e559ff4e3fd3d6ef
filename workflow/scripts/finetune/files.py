"""A file that exists is complete: write aside, then rename.

A complete directory carries `manifest.json`, which names its files and their sizes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.cli import UserError, run_again

MANIFEST = "manifest.json"


def aside_of(path: Path) -> Path:
    """Where it is written until it is complete: beside it, so that renaming does not copy."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def write_aside(path: str | Path) -> Iterator[Path]:
    """Yield a path to write to; it becomes `path` if the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = aside_of(path)
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def complete_directory(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes `path`, with a manifest, if all goes well."""
    path = Path(path)
    aside = aside_of(path)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        publish(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def publish(aside: Path, path: Path) -> None:
    """Write the manifest last, then put the folder in its place."""
    write_manifest(aside)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(aside, path)


def write_manifest(folder: Path) -> None:
    """Names and sizes of all files of a folder, in the folder."""
    (folder / MANIFEST).unlink(missing_ok=True)
    names = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    write_json(folder / MANIFEST, {str(name): (folder / name).stat().st_size for name in names})


def check_complete(folder: Path) -> None:
    """Raise UserError unless a folder holds every file that its manifest names, whole."""
    for name, size in read_json(folder / MANIFEST).items():
        found = (folder / name).stat().st_size if (folder / name).exists() else "missing"
        if found != size:
            raise UserError(
                f"{folder / name} is {found}, not {size} bytes as its manifest says. "
                f"{run_again(f'--forcerun {folder}')}, which makes the folder anew."
            )


def write_json(path: str | Path, content: Any) -> None:
    """Strict JSON: a NaN is an error here, not a file that other tools cannot read."""
    with write_aside(path) as aside:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        aside.write_text(text + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def digest_json(content: Any) -> str:
    """SHA-256 of a value, independent of key order."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
