"""The picture of the rules and the map of the library show all that is there."""

import re

from project import ROOT


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
