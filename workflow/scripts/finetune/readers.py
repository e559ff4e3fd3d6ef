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
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from finetune.cli import UserError
from finetune.json_text import BrokenFileError, Row, RowError, json_rows, load_json
from finetune.sources import FILE_KINDS, file_kind
from finetune.utf8 import is_utf8, name_encoding, not_utf8, not_utf8_lines, refuse_wide

BLOCK_BYTES = 1_000_000
BLOCK_ROWS = 2_000
BLANK = codecs.BOM_UTF8 + b" \t\r\n\v\f"


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
            yield from line_rows(self.content, self.start)
        else:
            for number, row in enumerate(self.content.to_pylist(), self.start):
                yield number, {name: without_nulls(value) for name, value in row.items()}


def read_blocks(path: Path, sample_by: str) -> Iterator[Block]:
    """Blocks of a file. Raises UserError for a file that cannot be read at all."""
    kind = file_kind(path)
    if kind is None:
        what = "holds no files of rows" if path.is_dir() else "is no file of rows"
        raise UserError(f"{path} {what}; known: {', '.join(FILE_KINDS)}, each also .gz")
    with readable(path), open_binary(path) as file:
        if kind == "parquet":
            with seekable(file, path) as table:
                yield from parquet_blocks(table, path)
            return
        refuse_wide(file)
        if kind == "jsonl" or (kind == "json" and is_lines(file)):
            yield from line_blocks(file, str(path))
            return
        # a line break inside a CSV field is the user's; in plain text it is the system's
        newline = None if kind == "txt" else ""
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline)
        if kind == "json":
            rows = json_rows(text)
        elif kind == "txt":
            rows = text_rows(text, sample_by)
        else:
            rows = csv_rows(text, "\t" if kind == "tsv" else ",")
        while part := list(islice(rows, BLOCK_ROWS)):
            yield Block(str(path), part[0][0], part)


def open_binary(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb")


@contextmanager
def seekable(file: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """Parquet is read back and forth, and each step back in a .gz starts at its beginning."""
    if path.suffix.lower() != ".gz":
        yield file
        return
    with tempfile.TemporaryFile() as unpacked:
        shutil.copyfileobj(file, unpacked)
        unpacked.seek(0)
        yield unpacked


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
            line, lines = not_utf8_lines(file)
        raise UserError(f"{path}:{line}: {not_utf8(name_encoding(lines))} {path}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file ({error}); copy it again") from None
    except FileNotFoundError:
        raise UserError(f"there is no file {path} here ({Path.cwd()})") from None


def line_blocks(file: IO[bytes], place: str) -> Iterator[Block]:
    start = 1
    while chunk := file.read(BLOCK_BYTES):
        chunk += file.readline()
        yield Block(place, start, chunk)
        start += chunk.count(b"\n")


def line_rows(content: bytes, start: int) -> Iterator[tuple[int, Row]]:
    """Rows of whole lines of JSONL. Where one is not UTF-8, all of them tell the encoding."""
    lines = content.split(b"\n")
    encoding = None if is_utf8(content) else name_encoding(not_utf8_lines(lines)[1])
    for number, line in enumerate(lines, start):
        if line.strip(BLANK):
            yield number, parse_line(line, encoding)


def parse_line(line: bytes, encoding: str | None = None) -> Row:
    """A line of JSONL; `encoding` is what it seems to be in if it is not UTF-8."""
    try:
        row = load_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return RowError(not_utf8(encoding))
    except RowError as error:
        return error
    return row if isinstance(row, dict) else RowError("not a JSON object")


def is_lines(file: IO[bytes]) -> bool:
    """Whether a .json file is JSON Lines in truth: its first line looks like a whole object. A
    list can be one line of gigabytes, so that is not read for this."""
    start = b""
    while not start and (part := file.read(BLOCK_BYTES)):
        start = part.lstrip(BLANK)
    first = (start + file.readline()).split(b"\n")[0] if start.startswith(b"{") else b""
    file.seek(0)
    return first.rstrip(BLANK).endswith(b"}")


def csv_rows(file: IO[str], delimiter: str) -> Iterator[tuple[int, Row]]:
    """Rows with the line they start on: a quoted field may hold line breaks."""
    csv.field_size_limit(sys.maxsize)  # else a text of 131,073 letters is "not CSV"
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    line = 1
    try:
        header = next(filter(None, reader), [])
        check_names(header)
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
        if sample_by == "document" or (sample_by == "paragraph" and line.strip()):
            part.append(line)
            continue
        yield from text_row([*part, line], start)
        part, start = [], number + 1
    yield from text_row(part, start)


def text_row(lines: list[str], start: int) -> Iterator[tuple[int, Row]]:
    while lines and not lines[-1].strip():
        lines.pop()
    text = "".join(lines).strip("\n")
    if text.strip():
        yield start, {"text": text}


def parquet_blocks(file: IO[bytes], path: Path) -> Iterator[Block]:
    import pyarrow.parquet as pq

    start = 1
    try:
        table = pq.ParquetFile(file)
        check_names(table.schema_arrow.names)
        for batch in table.iter_batches(BLOCK_ROWS):
            yield Block(str(path), start, batch)
            start += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise BrokenFileError(f"not Parquet: {error}") from None


def check_names(names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise BrokenFileError(f"a column appears twice: {', '.join(names)}")


def without_nulls(value: Any) -> Any:
    """Arrow gives every object of a column the keys of all of them, and null where it had none.
    In JSON a null is what someone wrote."""
    if isinstance(value, dict):
        return {key: without_nulls(v) for key, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value
