"""Single cells of a row: the text that they hold, or the reason why they hold none."""

from __future__ import annotations

from typing import Any

from finetune.json_text import RowError, load_json


def text(value: Any, name: str, empty: bool = False) -> str:
    """Raises RowError for anything but text; `empty` text is fine only where it is said."""
    if value is None:
        raise RowError(f"{name} is missing")
    if not isinstance(value, str):
        raise RowError(f"{name} is {type(value).__name__}, not text")
    if not empty and not value.strip():
        raise RowError(f"{name} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(f"{name} holds a lone surrogate, which is no text") from None
    return value


def label(value: Any) -> str:
    """A class, named by a text or a whole number. Spaces around it are no other class."""
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    named = str(value if isinstance(value, bool) else int(value)) if whole else value
    return text(named, "label").strip()


def listed(value: Any, name: str) -> list:
    """A list, or the JSON text of one: a CSV file can hold it in no other way."""
    if value is None:
        raise RowError(f"{name} is missing")
    if isinstance(value, str):
        try:
            value = load_json(value)
        except RowError as error:
            raise RowError(f"{name} is text, but {error}") from None
    if not isinstance(value, list) or not value:
        raise RowError(f"{name} is not a list, or is empty")
    return value
