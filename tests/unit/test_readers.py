"""Readers: small files, good and bad, and exactly what is read from each."""

from __future__ import annotations

import gzip
import json
import math
from io import BytesIO, StringIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune import json_text, readers
from finetune.cli import UserError
from finetune.json_text import RowError
from finetune.readers import read_blocks


def read(path, sample_by: str = "document") -> list[tuple]:
    """(line, row or reason) of a file."""
    rows = [row for block in read_blocks(path, sample_by) for row in block.rows()]
    return [(line, str(row) if isinstance(row, RowError) else row) for line, row in rows]


def refusal(path) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    return str(caught.value).replace(f"{path.parent}/", "")


def parquet(rows: dict | pa.Table) -> bytes:
    file = BytesIO()
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.table(rows), file)
    return file.getvalue()


CP1252 = "not UTF-8 (it looks like cp1252); convert the file: iconv -f cp1252 -t utf-8"
CP1251 = "not UTF-8 (it looks like cp1251); convert the file: iconv -f cp1251 -t utf-8"
NO_LIST = "not a list of rows; write [{…}, {…}], or one object a line as .jsonl"
RAGGED = "another number of fields than the header"
QUOTES = "not JSON: Expecting property name enclosed in double quotes"
TOO_DEEP = (
    "not JSON: maximum recursion depth exceeded while decoding a JSON array from a unicode string"
)
ROWS = [{"a": 1}, {"a": 2}]
TWO = [(1, {"a": 1}), (2, {"a": 2})]


def wide(encoding: str) -> str:
    return f"not UTF-8 (it looks like {encoding}); convert the file: iconv -f {encoding} -t utf-8"


# Name of the file, its content, and its rows by line (in a JSON list and in Parquet by number); or,
# for a file that is refused, the text.
FILES: dict[str, tuple[str, str | bytes, list | str]] = {
    # JSON Lines
    "lines": ("x.jsonl", '{"a": 1}\n{"a": 2}\n', TWO),
    "another name": ("x.ndjson", '{"a": 1}\n{"a": 2}\n', TWO),
    "capitals": ("X.JSONL", '{"a": 1}\n{"a": 2}\n', TWO),
    "no last line break": ("x.jsonl", '{"a": 1}\n{"a": 2}', TWO),
    "empty": ("x.jsonl", "", []),
    "byte order mark alone": ("x.jsonl", b"\xef\xbb\xbf", []),
    "blank lines are counted": (
        "x.jsonl",
        '\n \t\n{"a": 1}\n\n{"a": 2}',
        [(3, ROWS[0]), (5, ROWS[1])],
    ),
    "byte order mark": ("x.jsonl", b'\xef\xbb\xbf{"a": 1}\n{"a": 2}', TWO),
    "marks of joined files": ("x.jsonl", b'\xef\xbb\xbf{"a": 1}\n\xef\xbb\xbf{"a": 2}\n', TWO),
    "CRLF": ("x.jsonl", '{"a": 1}\r\n{"a": 2}\r\n', TWO),
    "line separators in a text": ("x.jsonl", '{"a": "x\u2028y\x85"}', [(1, {"a": "x\u2028y\x85"})]),
    "one line in cp1252": (
        "x.jsonl",
        '{"a": "ü"}\n'.encode() + '{"a": "Grüße aus München"}\n'.encode("cp1252") + b'{"a": 2}',
        [(1, {"a": "ü"}), (2, CP1252), (3, {"a": 2})],
    ),
    "one letter that says little": (
        "x.jsonl",
        '{"a": "caf\u00e9"}\n'.encode("cp1252"),
        [(1, CP1252)],
    ),
    "all lines in cp1251": (
        "x.jsonl",
        '{"a": "да"}\n{"a": "Привет, как твои дела"}\n'.encode("cp1251"),
        [(1, CP1251), (2, CP1251)],
    ),
    "UTF-16": ("x.jsonl", '{"a": 1}'.encode("utf-16"), f"x.jsonl: {wide('utf-16')}"),
    "UTF-16 without a mark": (
        "x.jsonl",
        '{"a": 1}'.encode("utf-16-le"),
        f"x.jsonl: {wide('utf-16le')}",
    ),
    "big-endian": ("x.jsonl", '{"a": 1}'.encode("utf-16-be"), f"x.jsonl: {wide('utf-16be')}"),
    "UTF-32": ("x.jsonl", '{"a": 1}'.encode("utf-32"), f"x.jsonl: {wide('utf-32')}"),
    "Python, not JSON": ("x.jsonl", "{'a': 1}\n", [(1, QUOTES)]),
    "cut off": ("x.jsonl", '{"a": "x', [(1, "not JSON: Unterminated string starting at")]),
    "two on a line": ("x.jsonl", '{"a": 1} {"a": 2}', [(1, "not JSON: Extra data")]),
    "no objects": (
        "x.jsonl",
        '[1]\n"a"\nnull\n3',
        [(n, "not a JSON object") for n in (1, 2, 3, 4)],
    ),
    "key twice": ("x.jsonl", '{"a": 1, "a": 1}\n{"a": 2}', [(1, "a key appears twice"), TWO[1]]),
    "key twice, inside": ("x.jsonl", '{"a": [{"b": 1, "b": 1}]}', [(1, "a key appears twice")]),
    "too deep": ("x.jsonl", "[" * 100_000 + '\n{"a": 2}', [(1, TOO_DEEP), TWO[1]]),
    "a null stays": ("x.jsonl", '{"a": {"b": null}}', [(1, {"a": {"b": None}})]),
    "huge number": ("x.jsonl", '{"a": 1e999}', [(1, {"a": math.inf})]),
    # JSON
    "list": ("x.json", '[{"a": 1}, {"a": 2}]', TWO),
    "list, CRLF and mark": ("x.json", b'\xef\xbb\xbf[\r\n{"a": 1},\r\n{"a": 2}]', TWO),
    "pretty-printed": ("x.json", json.dumps(ROWS, indent=1), TWO),
    "lines that are named .json": (
        "x.json",
        '\n{"a": 1}\n{"a": 2}\n',
        [(2, ROWS[0]), (3, ROWS[1])],
    ),
    "such lines, the first one bad": ("x.json", '{"a": 1,}\n{"a": 2}', [(1, QUOTES), TWO[1]]),
    "one object": ("x.json", '{"a": 1}', [TWO[0]]),
    "one object, pretty-printed": ("x.json", json.dumps(ROWS[0], indent=1), f"x.json:1: {NO_LIST}"),
    "list inside an object": (
        "x.json",
        json.dumps({"data": ROWS}, indent=1),
        f"x.json:1: {NO_LIST}",
    ),
    "empty JSON": ("x.json", " \n", []),
    "empty list": ("x.json", "[ ]\n", []),
    "no objects in it": (
        "x.json",
        '[1, {"a": 2},\n"a"]',
        [(1, "not a JSON object"), TWO[1], (3, "not a JSON object")],
    ),
    "twice in a list": (
        "x.json",
        '[{"b": {"c": 1, "c": 2}},\n{"a": 2}]',
        [(1, "a key appears twice"), TWO[1]],
    ),
    "no comma": (
        "x.json",
        '[{"a": 1}\n{"a": 2}]',
        "x.json:1: not JSON: no comma or ] after this row",
    ),
    "cut list": ("x.json", '[{"a": 1},\n{"a"', "x.json:2: not JSON: Expecting ':' delimiter"),
    "list without an end": (
        "x.json",
        '[{"a": 1}\n',
        "x.json:1: not JSON: no comma or ] after this row",
    ),
    "two lists": (
        "x.json",
        '[{"a": 1}]\n[{"a": 2}]',
        "x.json:2: not JSON: more text after the list",
    ),
    "list in cp1252": (
        "x.json",
        '[\n{"a": "Grüße aus München"}]'.encode("cp1252"),
        f"x.json:2: {CP1252} x.json",
    ),
    # CSV
    "CSV": ("x.csv", "a,b\n1,2\n", [(2, {"a": "1", "b": "2"})]),
    "TSV": ("x.tsv", "a\tb\n1,5\t2\n", [(2, {"a": "1,5", "b": "2"})]),
    "empty CSV": ("x.csv", "", []),
    "header alone": ("x.csv", "a,b\n", []),
    "semicolons": ("x.csv", 'a;b\n"1,5";2\n', [(2, {"a": "1,5", "b": "2"})]),
    "semicolons in fields": ("x.csv", "a,b\n1;2,3\n", [(2, {"a": "1;2", "b": "3"})]),
    "spaces about names": ("x.csv", "a, b \n1, 2\n", [(2, {"a": "1", "b": " 2"})]),
    "CSV, CRLF and mark": ("x.csv", b"\xef\xbb\xbfa,b\r\n1,2\r\n", [(2, {"a": "1", "b": "2"})]),
    "header after empty lines": ("x.csv", "\n\na\n1\n", [(4, {"a": "1"})]),
    "empty fields stay": ("x.csv", "a,b\n,\n", [(2, {"a": "", "b": ""})]),
    "quotes and commas": ("x.csv", 'a,b\n"x, ""y""",2\n', [(2, {"a": 'x, "y"', "b": "2"})]),
    "rows of several lines count from their first": (
        "x.csv",
        'a,b\n"one\n\ntwo",2\n\n3,"x\r\ny"\n5,6\n',
        [
            (2, {"a": "one\n\ntwo", "b": "2"}),
            (6, {"a": "3", "b": "x\r\ny"}),
            (8, {"a": "5", "b": "6"}),
        ],
    ),
    "ragged": (
        "x.csv",
        "a,b\n1\n1,2,3\n1,2",
        [(2, RAGGED), (3, RAGGED), (4, {"a": "1", "b": "2"})],
    ),
    "long field": ("x.csv", f"a\n{'x' * 200_000}\n", [(2, {"a": "x" * 200_000})]),
    "stray quote": ("x.csv", 'a,b\n1,2\n3,"x"y\n', "x.csv:3: not CSV: ',' expected after '\"'"),
    "quote never closed": (
        "x.csv",
        'a,b\n1,2\n3,"x\n5,6\n',
        "x.csv:3: not CSV: unexpected end of data (a quote that is never closed?)",
    ),
    "column twice": ("x.csv", "a,b,a\n1,2,3\n", "x.csv: a column appears twice: a, b, a"),
    "CSV in cp1252": (
        "x.csv",
        "a\n1\nGrüße aus München\n".encode("cp1252"),
        f"x.csv:3: {CP1252} x.csv",
    ),
    "CSV in UTF-16": ("x.csv", "a\n1\n".encode("utf-16"), f"x.csv: {wide('utf-16')}"),
    # plain text
    "text": ("x.txt", "\n one\n\ntwo\n\n", [(1, {"text": " one\n\ntwo"})]),
    "text, CRLF and mark": ("x.txt", b"\xef\xbb\xbfone\r\ntwo\r\n", [(1, {"text": "one\ntwo"})]),
    "white space alone": ("x.txt", " \n\t\n", []),
    "empty text": ("x.txt", "", []),
    "text in cp1252": (
        "x.txt",
        "one\nGrüße aus München\n".encode("cp1252"),
        f"x.txt:2: {CP1252} x.txt",
    ),
    # Parquet
    "Parquet": ("x.parquet", parquet({"a": [1, None]}), [(1, {"a": 1}), (2, {"a": None})]),
    "keys that Arrow filled in": (
        "x.parquet",
        parquet(pa.table({"m": [[{"x": 1}, {"y": {"z": None, "w": 2}}], None]})),
        [(1, {"m": [{"x": 1}, {"y": {"w": 2}}]}), (2, {"m": None})],
    ),
    "no rows": ("x.parquet", parquet({"a": pa.array([], pa.string())}), []),
    "other column twice": (
        "x.parquet",
        parquet(pa.table([[1], [2]], names=["a", "a"])),
        "x.parquet: a column appears twice: a, a",
    ),
    "no Parquet": ("x.parquet", b"PAR", "x.parquet: not Parquet: Parquet file size is 3 bytes"),
    # others
    "unknown": (
        "x.md",
        "",
        "x.md is no file of rows; known: jsonl, json, csv, tsv, parquet, txt, each also .gz",
    ),
}


def check(path, expected: list | str) -> None:
    if isinstance(expected, str):
        assert refusal(path).startswith(expected)
    else:
        assert read(path) == expected


@pytest.mark.parametrize("name", FILES)
def test_file(name, tmp_path) -> None:
    file, content, expected = FILES[name]
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    check(tmp_path / file, expected)


@pytest.mark.parametrize("name", FILES)
def test_same_file_compressed(name, tmp_path) -> None:
    file, content, expected = FILES[name]
    content = gzip.compress(content if isinstance(content, bytes) else content.encode())
    (tmp_path / f"{file}.gz").write_bytes(content)
    if isinstance(expected, str):
        expected = expected.replace(file, f"{file}.gz")
    check(tmp_path / f"{file}.gz", expected)


GZIP = "not a whole gzip file ("


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "txt", "parquet"])
def test_gzip_that_is_cut_off_or_none(kind, tmp_path) -> None:
    path = tmp_path / f"x.{kind}.gz"
    path.write_bytes(gzip.compress(b'[{"a": 1}]' * 1000)[:-9])
    assert refusal(path) == (
        f"x.{kind}.gz: {GZIP}Compressed file ended before the end-of-stream marker was reached); "
        "copy it again"
    )
    path.write_bytes(b"plain text")
    assert refusal(path) == f"x.{kind}.gz: {GZIP}Not a gzipped file (b'pl')); copy it again"


def test_parquet_with_broken_pages(tmp_path) -> None:
    content = bytearray(parquet({"a": [f"{n}" * 20 for n in range(20_000)]}))
    content[2000:6000] = b"\7" * 4000
    (tmp_path / "x.parquet").write_bytes(content)
    assert refusal(tmp_path / "x.parquet").startswith("x.parquet: not Parquet: ")


def test_number_longer_than_python_reads(tmp_path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": %s}' % ("1" * 5000))
    [(line, reason)] = read(tmp_path / "x.jsonl")
    assert line == 1
    assert reason.startswith("not JSON: Exceeds the limit (4300 digits)")


def test_file_that_is_not_there(tmp_path) -> None:
    assert refusal(tmp_path / "x.csv").startswith("there is no file x.csv here (")


TEXT = "one\ntwo\n\n\n three\n \t\nfour  \n\n"


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("breaks", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("sample_by", "rows"),
    [
        ("document", [(1, "one\ntwo\n\n\n three\n \t\nfour  ")]),
        ("paragraph", [(1, "one\ntwo"), (5, " three"), (7, "four  ")]),
        ("line", [(1, "one"), (2, "two"), (5, " three"), (7, "four  ")]),
    ],
)
def test_what_a_row_of_text_is(sample_by, rows, breaks, suffix, tmp_path) -> None:
    content = TEXT.replace("\n", breaks).encode()
    path = tmp_path / f"x.txt{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    assert read(path, sample_by) == [(line, {"text": text}) for line, text in rows]


# blocks and windows


@pytest.mark.parametrize("name", [n for n in FILES if n != "too deep"])
@pytest.mark.parametrize("size", [1, 7])
def test_size_of_blocks_changes_nothing(size, name, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", size)
    monkeypatch.setattr(readers, "BLOCK_ROWS", size)
    monkeypatch.setattr(json_text, "WINDOW", size)
    file, content, expected = FILES[name]
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    if name == "all lines in cp1251":  # each block guesses for itself
        expected = [(line, read(tmp_path / file)[line - 1][1]) for line in (1, 2)]
    check(tmp_path / file, expected)


def test_blocks_are_small(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 30)
    monkeypatch.setattr(readers, "BLOCK_ROWS", 3)
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n' * 10)
    (tmp_path / "x.csv").write_text("a\n" + "1\n" * 10)
    (tmp_path / "x.parquet").write_bytes(parquet({"a": [1] * 10}))
    for name, starts in (
        ("x.jsonl", [1, 5, 9]),
        ("x.csv", [2, 5, 8, 11]),
        ("x.parquet", [1, 4, 7, 10]),
    ):
        assert [block.start for block in read_blocks(tmp_path / name, "document")] == starts


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON), st.sampled_from([None, 0, 2]), st.integers(1, 9))
def test_list_of_anything_through_a_small_window(values, indent, window) -> None:
    before, json_text.WINDOW = json_text.WINDOW, window
    try:
        text = json.dumps(values, indent=indent, ensure_ascii=False)
        rows = [row for _, row in json_text.json_rows(StringIO(text))]
    finally:
        json_text.WINDOW = before
    expected = [value if isinstance(value, dict) else "not a JSON object" for value in values]
    assert [str(row) if isinstance(row, RowError) else row for row in rows] == expected


def test_window_moves_along(monkeypatch) -> None:
    """A list of any length takes the memory of some rows."""
    monkeypatch.setattr(json_text, "WINDOW", 100)
    window = json_text.Window(StringIO("[" + '{"a": 1},\n' * 1000 + "]"))
    monkeypatch.setattr(json_text, "Window", lambda file: window)
    sizes = {len(window.text) for _ in json_text.json_rows(None)}
    assert max(sizes) <= 300
