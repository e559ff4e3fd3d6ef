"""HTML pages, from the templates in workflow/templates. What is filled in is escaped."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from finetune.checks import percent
from finetune.visible import visible

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"


def render(template: str, **values) -> str:
    """One page. A value that the template names and `values` lacks is an error."""
    pages = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    pages.filters.update(visible=visible, percent=percent, thousands="{:,}".format)
    return pages.get_template(template).render(values)
