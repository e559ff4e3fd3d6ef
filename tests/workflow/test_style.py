"""The workflow is clean by Snakemake's own linter and formatter."""

import re
import subprocess
import sys

from project import ROOT, snakemake


def test_lint(tmp_path) -> None:
    config = str(ROOT / "config" / "config.yaml")
    done = snakemake("--lint", "--configfile", config, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "good condition" in done.stdout


def test_format() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "snakefmt.snakefmt", "--check", "Snakefile", "workflow"],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout


def test_the_picture_shows_every_rule() -> None:
    rules = set()
    for path in [ROOT / "Snakefile", *(ROOT / "workflow" / "rules").glob("*.smk")]:
        rules |= set(re.findall(r"^rule (\w+):|^use rule \w+ as (\w+)", path.read_text(), re.M))
    shown = re.findall(r"<text[^>]*>(\w+)</text>", (ROOT / "docs" / "dag.svg").read_text())
    assert sorted(shown) == sorted(a or b for a, b in rules)


def test_the_map_of_the_library_names_every_module_once() -> None:
    folder = ROOT / "workflow" / "scripts" / "finetune"
    modules = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    lines = (folder / "__init__.py").read_text().splitlines()
    named = re.findall(r"\w+", "\n".join(line[12:] for line in lines))  # beside the headings
    assert {name: named.count(name) for name in modules if named.count(name) != 1} == {}
