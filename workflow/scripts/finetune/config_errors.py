"""Read a configuration; say what is wrong in it, in which file and line, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from finetune.config import Config, Source, complete_run
from finetune.sources import file_kind, is_local, is_saved
from finetune.stages import METHOD_SECTIONS

Location = tuple[Any, ...]


class ConfigError(ValueError):
    """The configuration cannot be used. The text lists every fault found."""


def load_config(raw: dict, files: Iterable[str | Path] = ()) -> Config:
    """Validate `raw`, as YAML gives it; `files` are where it came from.

    Raises ConfigError with one line per fault: file, line, key, what is wrong, what to do.
    """
    try:
        config = Config.model_validate(with_complete_runs(raw))
        faults = [*dangling_names(config), *idle_sections(raw, config), *untested(config)]
        faults += [*idle_revisions(config), *idle_source_keys(raw, config)]
    except ValidationError as error:
        config, faults = None, list(readable(error, raw))
    trees = [(path, tree_of(path)) for path in map(str, files)]
    faults += [fault for _, tree in trees for fault in written_twice(tree)]
    if not faults:
        return config
    lines = dict.fromkeys(f"{where(loc, trees)}{text}" for loc, text in faults)
    raise ConfigError("The configuration has to be changed:\n" + "\n".join(lines))


def tree_of(path: str) -> Any:
    """What a YAML file holds, and where; by libyaml, which most builds of PyYAML have."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.compose(Path(path).read_text("utf-8"), Loader=loader)


def with_complete_runs(raw: dict) -> dict:
    """Merge defaults under each run, as far as the raw file has the right shape for it."""
    runs, defaults = raw.get("runs"), raw.get("defaults") or {}
    if not isinstance(runs, dict) or not isinstance(defaults, dict):
        return raw
    complete = {
        name: complete_run(defaults, run) if isinstance(run, dict) else run
        for name, run in runs.items()
    }
    return {**raw, "defaults": defaults, "runs": complete}


def dangling_names(config: Config) -> Iterable[tuple[Location, str]]:
    """Runs that name a model or a dataset that is not there."""
    for name, run in config.runs.items():
        for key, known in (("model", config.models), ("dataset", config.datasets)):
            if (value := getattr(run, key)) not in known:
                text = f"no {key} is called {value!r}{nearest(value, known)}"
                yield ("runs", name, key), text


def idle_sections(raw: dict, config: Config) -> Iterable[tuple[Location, str]]:
    """Sections written under a run whose method never reads them."""
    for name, run in config.runs.items():
        for section in METHOD_SECTIONS["qlora"]:
            if section in raw["runs"][name] and section not in METHOD_SECTIONS[run.method]:
                text = f"`method: {run.method}` does not read it; remove it or change the method"
                yield ("runs", name, section), text


def untested(config: Config) -> Iterable[tuple[Location, str]]:
    """Files without a test split. A hub dataset or a saved one may bring its own."""
    for name, dataset in config.datasets.items():
        if dataset.split.test == 0 and not any(map(may_bring_a_test_split, dataset.source)):
            text = "is 0, and no source brings a test split, on which every model is evaluated: "
            text += "set e.g. 0.1, or give a source `into: test`"
            yield ("datasets", name, "split", "test"), text


def idle_revisions(config: Config) -> Iterable[tuple[Location, str]]:
    """Of models that are not on the hub."""
    for name, model in config.models.items():
        if model.revision is not None and is_local(model.source):
            yield ("models", name, "revision"), f"{model.source} has none; remove it"


def idle_source_keys(raw: dict, config: Config) -> Iterable[tuple[Location, str]]:
    """What only datasets of the hub have (and split: saved ones), written for files."""
    for name, dataset in config.datasets.items():
        for index, source in enumerate(dataset.source):
            path = source.path
            files = file_kind(Path(path)) or (Path(path).exists() and not is_saved(path))
            idle = ["subset", "revision"] if is_local(path) else []
            for key in [*idle, "split"] if idle and files else idle:
                if getattr(source, key) is not None:
                    loc = written_place(("datasets", name, "source", index, key), raw)
                    yield loc, f"{path} has none; remove it"


def may_bring_a_test_split(source: Source) -> bool:
    if source.into is not None:
        return source.into == "test"
    return not is_local(source.path) or Path(source.path).is_dir()


def written_twice(node: Any, loc: Location = ()) -> Iterable[tuple[Location, str]]:
    """Keys that a section holds twice: YAML drops the first one without a word."""
    for index, entry in enumerate(node.value if isinstance(node, yaml.SequenceNode) else []):
        yield from written_twice(entry, (*loc, index))
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    seen: dict[str, int] = {}
    for key, value in pairs:
        here, line = (*loc, key.value), key.start_mark.line + 1
        if first := seen.get(key.value):
            text = f"is written twice, first in line {first}, which YAML would drop: "
            yield here, text + "join the two, or rename one"
        seen[key.value] = line
        yield from written_twice(value, here)


def readable(error: ValidationError, raw: dict) -> Iterable[tuple[Location, str]]:
    """Pydantic's faults in our words, at the place the user wrote."""
    for fault in error.errors():
        loc = written_place(fault["loc"], raw)
        if fault["type"] == "extra_forbidden":
            yield loc, f"unknown key{nearest(loc[-1], known_keys(fault['loc'][:-1]))}"
        elif fault["type"] == "missing":
            yield loc, "is required"
        else:
            text = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
            yield loc, OUR_WORDS.get(fault["type"], text) + found(fault["input"])


OUR_WORDS = {
    "model_type": "should hold keys of its own",
    "dict_type": "should hold keys of its own",
    "too_short": "should not be empty",
}
"""Where pydantic speaks of its classes."""


def found(value: Any) -> str:
    """A short value; a section is not shown."""
    if value is None:
        return " (found nothing)"
    return f" (found {value!r})" if isinstance(value, (str, int, float)) else ""


NO_KEYS = (
    *("[key]", "literal['all-linear']", "list[str]"),
    *("literal['auto']", "function-before[no_bool(), constrained-int]"),
)
"""What pydantic adds to a place: that a key is meant, or which type of several."""


def written_place(loc: Location, raw: dict) -> Location:
    """A fault in a merged run may stem from `defaults`: point there. One `source` may be written
    without a list."""
    loc = tuple(part for part in loc if part not in NO_KEYS)
    if loc[2:3] == ("source",) and not has(raw, loc[:4]):
        loc = (*loc[:3], *loc[4:])
    if len(loc) > 2 and loc[0] == "runs" and not has(raw, loc) and has(raw, ("defaults", *loc[2:])):
        return ("defaults", *loc[2:])
    return loc


def has(tree: Any, loc: Location) -> bool:
    try:
        for part in loc:
            tree = tree[part]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def known_keys(loc: Location) -> list[str]:
    """The keys that the section at `loc` takes."""
    section, parts = Config, iter(loc)
    for part in parts:
        annotation = section.model_fields[part].annotation
        section = section_class(annotation)
        if get_origin(annotation) in (dict, list):
            next(parts, None)  # the name of a model, dataset or run, or a place in a list
    return [field.alias or name for name, field in section.model_fields.items()]


def section_class(annotation: Any) -> type[BaseModel]:
    """Lora for `Lora`, Run for `dict[str, Run]`."""
    candidates = (annotation, *get_args(annotation))
    return next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))


def nearest(word: Any, known: Iterable[str]) -> str:
    """`: did you mean 'x'?`, or the list of what there is."""
    known = list(known)
    if close := get_close_matches(str(word), known, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; known here: {', '.join(known)}" if known else ""


def where(loc: Location, trees: list[tuple[str, Any]]) -> str:
    """`file:line: key: ` of the deepest part of `loc` that a file holds; later files win."""
    key = ".".join(map(str, loc)) or "(top level)"
    best: tuple[int, str] = (0, "")
    for path, node in trees:
        depth, line = deepest(node, loc)
        if depth >= best[0] and depth:
            best = (depth, f"{path}:{line}: ")
    return f"{best[1]}{key}: "


def deepest(node: Any, loc: Location) -> tuple[int, int]:
    """How many parts of `loc` a YAML tree holds, and the 1-based line of the last one."""
    depth, line = 0, 0
    for part in loc:
        if (pair := child(node, part)) is None:
            break
        depth, line, node = depth + 1, pair[0].start_mark.line + 1, pair[1]
    return depth, line


def child(node: Any, part: Any) -> tuple[Any, Any] | None:
    """Where a part of a section or list is written, and what it holds."""
    if isinstance(node, yaml.MappingNode):
        return next(((k, v) for k, v in reversed(node.value) if k.value == str(part)), None)
    if isinstance(node, yaml.SequenceNode) and part in range(len(node.value)):
        return node.value[part], node.value[part]
    return None
