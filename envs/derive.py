"""Write the conda environment of the rules from pins.txt: `python envs/derive.py`.

Snakemake copies an environment file before it creates the environment, so the file cannot
point at the requirements: it has to hold the versions itself.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
HEADER = """\
# The rules' environment for `snakemake --software-deployment-method conda`.
# Derived from pins.txt and requirements.txt by `make pins`. Do not edit.
name: finetune
channels:
  - conda-forge
dependencies:
  - python=3.11
  - cxx-compiler
  - pip
  - pip:
"""
INSTALL_EXAMPLE = """\
# Derived from pins.txt by `make pins`. Do not edit. Conda's pip section cannot say --no-deps.
python -m pip install --no-deps {requirements}
"""


def pins() -> dict[str, str]:
    """Version of each package, by its normalized name."""
    lines = (HERE / "pins.txt").read_text().splitlines()
    return {
        normalized(name): version
        for name, _, version in (line.partition("==") for line in lines)
        if version
    }


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(requirements: str) -> list[str]:
    """`name[extra]==version` for each line of a requirements file."""
    versions = pins()
    lines = (HERE / requirements).read_text().splitlines()
    names = [line for line in lines if line and not line.startswith(("#", "-"))]
    return [f"{name}=={versions[normalized(name.partition('[')[0])]}" for name in names]


def derived() -> dict[str, str]:
    """Content of each derived file, by its name."""
    packages = "".join(f"      - {requirement}\n" for requirement in pinned("requirements.txt"))
    examples = " ".join(pinned("requirements-example.txt"))
    return {
        "finetune.yaml": HEADER + packages,
        "finetune.post-deploy.sh": INSTALL_EXAMPLE.format(requirements=examples),
    }


if __name__ == "__main__":
    for name, content in derived().items():
        (HERE / name).write_text(content)
