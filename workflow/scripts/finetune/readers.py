"""Files as people have them, cut into blocks of raw rows with their line numbers.

Lines are read here and not by `datasets`: Arrow's type inference turns strings to null depending
on the order of rows (huggingface/datasets issue 7222), and it keeps no line numbers. A block is
what one process turns into rows at a time.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from finetune.cli import UserError
from finetune.sources import FILE_KINDS, file_kind

BLOCK_BYTES = 1_000_000
BLOCK_ROWS = 2_000
WIDE = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order marks. UTF-32 comes first: one of its marks starts with one of UTF-16's."""
COMMON = ("cp1252", "cp1251", "koi8_r", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr")


class RowError(ValueError):
    """Why one row cannot be used."""


Row = dict | RowError


@dataclass(frozen=True)
class Block:
    """Raw rows of one place."""

    place: str
    """A file, or a split of a hub dataset: what the ids of its rows start with."""
    start: int
    """Line, or row, of the first one, from 1."""
    content: bytes | pa.RecordBatch | pa.Table | list[tuple[int, Row]]
    """Whole lines of JSON, a table, or rows that carry their own line numbers."""

    def rows(self) -> Iterator[tuple[int, Row]]:
        """(line or row number, row)."""
        if isinstance(self.content, list):
            yield from self.content
        elif isinstance(self.content, bytes):
            for number, line in enumerate(self.content.split(b"\n"), self.start):
                if line.strip():
                    yield number, parse_line(line)
        else:
            yield from enumerate(self.content.to_pylist(), self.start)


def read_blocks(path: Path, sample_by: str) -> Iterator[Block]:
    """Blocks of a file. Raises UserError for a file that cannot be read at all."""
    kind = file_kind(path)
    if kind is None:
        raise UserError(f"{path} is no file of rows; known: {', '.join(FILE_KINDS)}, each also .gz")
    with readable(path), open_binary(path) as file:
        if kind == "parquet":
            yield from parquet_blocks(file, path)
            return
        refuse_wide(file)
        if kind == "jsonl" or (kind == "json" and is_lines(file)):
            yield from line_blocks(file, str(path))
            return
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        if kind == "json":
            rows = json_rows(text.read())
        elif kind == "txt":
            rows = text_rows(text, sample_by)
        else:
            rows = csv_rows(text, "\t" if kind == "tsv" else ",")
        while part := list(islice(rows, BLOCK_ROWS)):
            yield Block(str(path), part[0][0], part)


def open_binary(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")


class BrokenFileError(ValueError):
    """Why a file cannot be read on. `line` says where, if that is known."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file into one line that names it."""
    try:
        yield
    except BrokenFileError as error:
        place = f"{path}:{error.line}" if error.line else path
        raise UserError(f"{place}: {error}") from None
    except UnicodeDecodeError:
        with open_binary(path) as file:
            name = name_encoding(file.read(BLOCK_BYTES))
        raise UserError(f"{path}: {not_utf8(name)} {path}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file ({error}); copy it again") from None
    except FileNotFoundError:
        raise UserError(f"there is no file {path} here ({Path.cwd()})") from None


def name_encoding(data: bytes) -> str | None:
    """A likely encoding of text that is not UTF-8."""
    from charset_normalizer import from_bytes

    for mark, name in WIDE.items():
        if data.startswith(mark):
            return name
    best = from_bytes(data[:20_000], cp_isolation=list(COMMON)).best()
    return best.encoding if best else None


def not_utf8(encoding: str | None) -> str:
    seems = f" (it looks like {encoding})" if encoding else ""
    return f"not UTF-8{seems}; convert the file: iconv -f {encoding or 'latin1'} -t utf-8"


def refuse_wide(file: IO[bytes]) -> None:
    """UTF-16 has line breaks of two bytes, so lines could not even be counted."""
    start = file.read(4)
    file.seek(0)
    if name := next((name for mark, name in WIDE.items() if start.startswith(mark)), None):
        raise BrokenFileError(not_utf8(name))


def line_blocks(file: IO[bytes], place: str) -> Iterator[Block]:
    start = 1
    while chunk := file.read(BLOCK_BYTES):
        chunk += file.readline()
        yield Block(place, start, chunk)
        start += chunk.count(b"\n")


def parse_line(line: bytes) -> Row:
    """A line of JSONL."""
    try:
        row = load_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return RowError(not_utf8(name_encoding(line)))
    except RowError as error:
        return error
    return row if isinstance(row, dict) else RowError("not a JSON object")


def load_json(text: str) -> Any:
    """Raises RowError for broken JSON, and for what Python will not read (too deep, too long)."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RowError:
        raise
    except (ValueError, RecursionError) as error:
        raise RowError(f"not JSON: {getattr(error, 'msg', error)}") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise RowError("a key appears twice")
    return row


def is_lines(file: IO[bytes]) -> bool:
    """Whether a .json file is JSON Lines in truth: its first line is an object by itself."""
    first = next((line for line in file if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    file.seek(0)
    return isinstance(parse_line(first), dict)


def json_rows(text: str) -> Iterator[tuple[int, Row]]:
    """The objects of one JSON list, with the line that each starts on."""
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    position, line, done = skip(text, 0), 1, 0
    if text[position : position + 1] != "[":
        raise BrokenFileError(
            "not a list of rows; write [{…}, {…}], or one object a line as .jsonl", 1
        )
    position = skip(text, position + 1)
    while text[position : position + 1] != "]":
        line, done = line + text.count("\n", done, position), position
        try:
            row, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:  # a key that appears twice too
            raise BrokenFileError(f"not JSON: {getattr(error, 'msg', error)}", line) from None
        yield line, row if isinstance(row, dict) else RowError("not a JSON object")
        position = skip(text, position)
        if text[position : position + 1] == ",":
            position = skip(text, position + 1)
        elif text[position : position + 1] != "]":
            raise BrokenFileError("not JSON: no comma or ] after this row", line)


def skip(text: str, position: int) -> int:
    """The next position that is no white space."""
    while text[position : position + 1] in (" ", "\t", "\r", "\n"):
        position += 1
    return position


def csv_rows(file: IO[str], delimiter: str) -> Iterator[tuple[int, Row]]:
    """Rows with the line they start on: a quoted field may hold line breaks."""
    csv.field_size_limit(sys.maxsize)  # else a text of 131,073 letters is "not CSV"
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    line = 1
    try:
        header = next(filter(None, reader), [])
        if len(set(header)) < len(header):
            raise BrokenFileError(f"a column appears twice in the header: {', '.join(header)}")
        line = reader.line_num + 1
        for fields in reader:
            if len(fields) == len(header):
                yield line, dict(zip(header, fields, strict=True))
            elif fields:  # else it is an empty line
                yield line, RowError("another number of fields than the header")
            line = reader.line_num + 1
    except csv.Error as error:
        quote = " (a quote that is never closed?)" if "end of data" in str(error) else ""
        raise BrokenFileError(f"not CSV: {error}{quote}", line) from None


def text_rows(file: Iterable[str], sample_by: str) -> Iterator[tuple[int, Row]]:
    """Plain text as one row a document, paragraph or line. Empty ones are no rows."""
    part: list[str] = []
    start = 1
    for number, line in enumerate(file, start=1):
        ends = {"line": True, "paragraph": not line.strip(), "document": False}[sample_by]
        part.append(line)
        if ends:
            yield from text_row(part, start)
            part, start = [], number + 1
    yield from text_row(part, start)


def text_row(lines: list[str], start: int) -> Iterator[tuple[int, Row]]:
    text = "".join(lines).strip("\r\n")
    if text.strip():
        yield start, {"text": text}


def parquet_blocks(file: IO[bytes], path: Path) -> Iterator[Block]:
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise BrokenFileError(f"not Parquet: {error}") from None
    start = 1
    for batch in table.iter_batches(BLOCK_ROWS):
        yield Block(str(path), start, batch)
        start += len(batch)
