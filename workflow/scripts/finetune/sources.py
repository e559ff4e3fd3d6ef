"""Where a model or dataset comes from: this machine, an installed package, or the hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.cli import UserError

if TYPE_CHECKING:
    from finetune.config import Model

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FILE_KINDS = ("jsonl", "json", "csv", "tsv", "parquet", "txt")
SAVED = ("dataset_dict.json", "dataset_info.json")
"""What `datasets` writes into a folder of `save_to_disk`."""


def file_kind(path: Path) -> str | None:
    """`csv` for `a.csv` and `a.csv.gz`; None for a file that holds no rows."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    kind = suffixes[-1].removeprefix(".") if suffixes else ""
    kind = "jsonl" if kind == "ndjson" else kind
    return kind if kind in FILE_KINDS else None


def is_local(source: str) -> bool:
    """A path, rather than a hub id: it says so (`./`, `/`, `~`), has a file's ending, is a
    pattern, or exists."""
    path = Path(source)
    looks = source.startswith((".", "/", "~")) or path.suffix == ".gguf" or file_kind(path)
    return bool(looks) or path.exists() or not HUB_ID.fullmatch(source)


def is_saved(path: str) -> bool:
    """A folder of `save_to_disk`."""
    return any(Path(path, name).is_file() for name in SAVED)


def data_files(path: str) -> list[str]:
    """The files behind a local path, folder or pattern, sorted. Where there is none, the path
    itself: Snakemake, or whoever opens it, then says what is missing."""
    if Path(path).is_dir():
        is_data = not_cached if is_saved(path) else file_kind
        found = [str(file) for file in visible_files(Path(path), is_file_or_lost) if is_data(file)]
    else:
        matches = [path] if Path(path).exists() else glob.glob(path, recursive=True)
        found = [match for match in matches if is_file_or_lost(Path(match))]
    return sorted(found) or [path]


def is_file_or_lost(path: Path) -> bool:
    """A link to nothing counts, so that the missing file is an error and not a gap in the data."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def not_cached(file: Path) -> bool:
    """`datasets` leaves caches in a saved folder when someone works with it."""
    return not file.name.startswith("cache-")


def data_inputs(paths: Iterable[str]) -> list[str]:
    """Files on this machine, behind the paths of a dataset, whose change must prepare it again."""
    return [file for path in paths if is_local(path) for file in data_files(path)]


def locate_model(source: str) -> Path | None:
    """The folder or GGUF file of a model that is on this machine; None for a hub id."""
    if source.startswith("package:"):
        path = inside_package(source.removeprefix("package:"))
    elif is_local(source):
        path = Path(source)
    else:
        return None
    if path.is_file() and path.suffix != ".gguf":
        raise UserError(f"{source} is a file. A model is a folder with a config.json, or a .gguf.")
    if path.is_dir() and not (path / "config.json").exists():
        raise UserError(f"{source} has no config.json, so it is no Hugging Face model folder.")
    if not path.exists():
        raise UserError(
            f"there is no file or folder {source} here ({Path.cwd()}). "
            "A hub model is written org/name, without a leading dot or slash."
        )
    return path


def inside_package(reference: str) -> Path:
    """`import_name/path/inside` as a path on this machine."""
    name, _, inner = reference.partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"the Python package {name!r} of source `package:{reference}` is not installed here. "
            "Is it the name that is imported? What config/config.yaml wants comes with `make "
            "install`; a package of your own you install into the same environment."
        )
    path = Path(next(iter(spec.submodule_search_locations))) / inner
    if not path.exists():
        raise UserError(f"the Python package {name!r} has no file {inner!r}.")
    return path


def model_inputs(model: Model) -> list[str]:
    """Files on this machine whose change must fetch a model again."""
    template = model.chat_template
    files = [template] if template and Path(template).is_file() else []
    if model.source.startswith("package:") or not is_local(model.source):
        return files
    path = Path(model.source)
    return files + (sorted(map(str, visible_files(path))) if path.is_dir() else [model.source])


def visible_files(folder: Path, wanted: Callable[[Path], bool] = Path.is_file) -> list[Path]:
    """All files under a folder, also through links, but hidden ones, such as the .cache/ of
    `hf download`."""
    names = glob.glob("**/*", root_dir=folder, recursive=True)
    return [folder / name for name in names if wanted(folder / name)]
