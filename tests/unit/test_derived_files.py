"""Derived files: the schema and the environments say what their sources say."""

import importlib.util
import json
import re
import sys
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
ENVS = ROOT / "envs"
REQUIREMENTS = ("requirements.txt", "requirements-dev.txt", "requirements-example.txt")


def load_script(path: Path) -> ModuleType:
    """A script that is in no package. There are two `derive.py`."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


envs = load_script(ENVS / "derive.py")
schemas = load_script(ROOT / "workflow/schemas/derive.py")
SCHEMA = ROOT / "workflow/schemas/config.schema.json"
CONFIGS = [ROOT / "config/config.yaml", *sorted((ROOT / "config/examples").glob("*.yaml"))]


def test_schema_is_that_of_the_config_classes() -> None:
    """`make schema` writes it again."""
    assert SCHEMA.read_text() == schemas.schema()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_schema_accepts_the_configs_that_ship(path) -> None:
    """Editors read YAML 1.2, in which `1e-4` is a number."""
    config = yaml.load(path.read_text(), Yaml12)
    jsonschema.validate(config, json.loads(SCHEMA.read_text()))


class Yaml12(yaml.SafeLoader):
    pass


Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"\d+e-?\d+$"), list("123456789")
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"runs": {"a": {"sed": 1}}}, "'sed' was unexpected"),
        ({"runs": {"a": {"lora": {"rank": 0}}}}, "0 is less than the minimum of 1"),
        ({"runs": {"a": {"method": "lorra"}}}, "'lorra' is not one of"),
        ({"runs": {}}, "{} should be non-empty"),
        ({"models": {"m": {}}}, "'source' is a required property"),
        ({"datasets": {"d": {"source": 3}}}, "3 is not valid under any of the given schemas"),
        (
            {"datasets": {"d": {"source": [{"pth": "x"}]}}},
            "{'pth': 'x'} is not valid under any of the given schemas",
        ),
    ],
    ids=str,
)
def test_schema_refuses_what_the_classes_refuse(change, text) -> None:
    config = {
        "models": {"m": {"source": "x/y"}},
        "datasets": {"d": {"source": "x.csv"}},
        "runs": {"a": {}},
    }
    jsonschema.validate(config, json.loads(SCHEMA.read_text()))
    with pytest.raises(jsonschema.ValidationError, match=re.escape(text)):
        jsonschema.validate(config | change, json.loads(SCHEMA.read_text()))


def needs(file: str) -> list[str]:
    lines = (ENVS / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-"))]


ALL_NEEDS = [(file, need) for file in REQUIREMENTS for need in needs(file)]
PINS = [x for x in (ENVS / "pins.txt").read_text().splitlines() if not x.startswith("#")]


@pytest.mark.parametrize("name", ["finetune.yaml", "finetune.post-deploy.sh"])
def test_environment_is_that_of_the_pins(name) -> None:
    """`make pins` writes it again."""
    assert (ENVS / name).read_text() == envs.derived()[name]


def test_every_derived_file_is_tested() -> None:
    assert set(envs.derived()) == {"finetune.yaml", "finetune.post-deploy.sh"}


def test_conda_environment_holds_every_need_with_its_version() -> None:
    conda = yaml.safe_load((ENVS / "finetune.yaml").read_text())
    [pip] = [x["pip"] for x in conda["dependencies"] if isinstance(x, dict)]
    assert [line.partition("==")[0] for line in pip] == needs("requirements.txt")
    assert all(re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.]+", line) for line in pip)


def test_every_pin_is_one_exact_version() -> None:
    assert [line for line in PINS if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []


def test_no_package_is_pinned_twice() -> None:
    names = [envs.normalized(line.partition("==")[0]) for line in PINS]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(("file", "need"), ALL_NEEDS)
def test_every_need_is_pinned_once_and_only_in_pins(file, need) -> None:
    name, _, version = need.partition("==")
    assert version == ""
    pinned = [envs.normalized(line.partition("==")[0]) for line in PINS]
    assert pinned.count(envs.normalized(name.partition("[")[0])) == 1


@pytest.mark.parametrize("file", REQUIREMENTS)
def test_every_requirements_file_is_held_to_the_pins(file) -> None:
    assert "-c pins.txt" in (ENVS / file).read_text().splitlines()


def test_installed_versions_are_the_pinned_ones() -> None:
    """Except for a local label: torch may be `2.x.y+cpu` or `+cu130`."""
    pinned = envs.pins()
    installed = {name: Version(distribution(name).version).public for name in pinned}
    assert installed == pinned


def bring(requirement: Requirement, found: set[str]) -> None:
    """Add to `found` what an installed package needs here, to any depth."""
    extras = ("", *requirement.extras)
    for need in map(Requirement, distribution(requirement.name).requires or []):
        wanted = need.marker is None or any(need.marker.evaluate({"extra": e}) for e in extras)
        key = f"{envs.normalized(need.name)}[{','.join(sorted(need.extras))}]"
        if wanted and key not in found:
            found.add(key)
            bring(need, found)


def test_pins_are_what_is_needed_and_what_that_brings() -> None:
    """Except for setuptools, which `venv` and conda bring, and for torch's CUDA libraries, whose
    versions torch itself fixes."""
    found: set[str] = set()
    for file, need in ALL_NEEDS:
        found.add(envs.normalized(need))
        if file != "requirements-example.txt":  # installed with --no-deps
            bring(Requirement(need), found)
    names = {name.partition("[")[0] for name in found} - {"setuptools", "triton"}
    names = {name for name in names if not name.startswith(("nvidia-", "cuda-"))}
    assert names == {envs.normalized(line.partition("==")[0]) for line in PINS}


@pytest.mark.parametrize("file", ["Dockerfile", "finetune.def"])
def test_containers_install_the_pins(file) -> None:
    """From the very files, on the Python of the conda environment; no version of their own."""
    text = (ENVS / file).read_text()
    python = re.search(r"python=(\S+)", (ENVS / "finetune.yaml").read_text())[1]
    assert re.search(rf"^From:? python:{re.escape(python)}-slim$", text, re.M | re.I)
    assert "pip install --no-cache-dir -r /envs/requirements.txt" in text
    assert "pip install --no-cache-dir --no-deps -r /envs/requirements-example.txt" in text
    copied = set(re.findall(r"(?<![/\w-])[\w-]+\.txt", text))
    assert copied == {"pins.txt", "requirements.txt", "requirements-example.txt"}
    assert "==" not in text
