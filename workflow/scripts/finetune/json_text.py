"""JSON as people have it: strict about what would lose data, and a list larger than memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

WINDOW = 1_000_000
"""Letters of a JSON list that are in memory, if no row is larger."""
WHITE = tuple(" \t\r\n")
NO_LIST = "not a list of rows; write [{…}, {…}], or one object a line as .jsonl"


class RowError(ValueError):
    """Why one row cannot be used."""


class BrokenFileError(ValueError):
    """Why a file cannot be read on. `line` says where, if that is known."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line


Row = dict | RowError


def load_json(text: str) -> Any:
    """Raises RowError for broken JSON, and for what Python will not read (too deep, too long)."""
    try:
        return DECODER.decode(text)
    except RowError:
        raise
    except (ValueError, RecursionError) as error:
        raise RowError(in_short(error)) from None


def in_short(error: Exception) -> str:
    """Without the position, so that reasons can be counted."""
    return f"not JSON: {getattr(error, 'msg', error)}"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise RowError("a key appears twice")
    return row


DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
"""`json.loads` would make one for each row."""


def json_rows(file: IO[str]) -> Iterator[tuple[int, Row]]:
    """The objects of one JSON list, numbered from 1: a list is often a single line.

    Raises BrokenFileError.
    """
    text, number = Window(file), 0
    if (start := text.next()) != "[":
        if start:
            raise BrokenFileError(NO_LIST, 1)
        return  # an empty file
    text.position += 1
    while text.next() != "]":
        line = text.here()
        try:
            row = text.value()
        except (ValueError, RecursionError) as error:
            raise BrokenFileError(in_short(error), line) from None
        number += 1
        usable = isinstance(row, (dict, RowError))
        yield number, row if usable else RowError("not a JSON object")
        if text.next() == ",":
            text.position += 1
        elif text.next() != "]":
            raise BrokenFileError("not JSON: no comma or ] after this row", line)
    text.position += 1
    if text.next():
        raise BrokenFileError("not JSON: more text after the list", text.here())


class Window:
    """Text of which a part is in memory."""

    def __init__(self, file: IO[str]) -> None:
        self.file, self.text, self.position = file, "", 0
        self.line, self.counted = 1, 0
        """The line at `counted`."""
        self.twice = False
        self.decoder = json.JSONDecoder(object_pairs_hook=self.keys)

    def keys(self, pairs: list[tuple[str, Any]]) -> dict:
        """An exception here would leave unknown where the next row starts."""
        row = dict(pairs)
        self.twice = self.twice or len(row) < len(pairs)
        return row

    def here(self) -> int:
        """The line of the position."""
        self.line += self.text.count("\n", self.counted, self.position)
        self.counted = self.position
        return self.line

    def more(self) -> bool:
        """Drop what is done and read as much again as there is left. False at the end."""
        self.here()
        rest = self.text[self.position :]
        read = self.file.read(max(WINDOW, len(rest)))
        self.text, self.position, self.counted = rest + read, 0, 0
        return bool(read)

    def next(self) -> str:
        """Go to the next character that is no white space; "" at the end."""
        while True:
            while (char := self.text[self.position : self.position + 1]) in WHITE:
                self.position += 1
            if char or not self.more():
                return char

    def value(self) -> Any:
        """The value that starts here; a RowError for one that is JSON and no good."""
        while True:
            self.twice = False
            try:
                value, end = self.decoder.raw_decode(self.text, self.position)
            except json.JSONDecodeError:
                if self.more():  # it may only be cut off by the window
                    continue
                raise
            length = end - self.position
            if end + len("e+") >= len(self.text) and self.more():
                continue  # a number may go on
            self.position += length
            return RowError("a key appears twice") if self.twice else value
