"""Records: files as people have them, to rows or to the exact reason why not."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune.cli import UserError
from finetune.records import Reject, RowError, find_format, read_rows, to_messages

NOT_UTF8 = "not UTF-8; convert the file, e.g. iconv -f latin1 -t utf-8"
CSV_NOT_UTF8 = "x.csv is not UTF-8; convert it, e.g. iconv -f latin1 -t utf-8"
TOO_DEEP = (
    "not JSON: maximum recursion depth exceeded while decoding a JSON array from a unicode string"
)
RAGGED = "another number of fields than the header"


def rows_of(folder, name: str, content: bytes | str) -> list:
    """(line, row or reason) of a file with this content."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [(line, str(row) if isinstance(row, RowError) else row) for line, row in read_rows(path)]


def refusal_of(folder, name: str, content: bytes | str) -> str:
    with pytest.raises(UserError) as caught:
        rows_of(folder, name, content)
    return str(caught.value).replace(f"{folder}/", "")


JSONL = {
    "plain": ('{"a": 1}\n{"a": 2}\n', [(1, {"a": 1}), (2, {"a": 2})]),
    "no last line break": ('{"a": 1}\n{"a": 2}', [(1, {"a": 1}), (2, {"a": 2})]),
    "empty file": ("", []),
    "blank lines are passed over, and counted": (
        '\n  \t\n{"a": 1}\n\n{"a": 2}',
        [(3, {"a": 1}), (5, {"a": 2})],
    ),
    "BOM": (b'\xef\xbb\xbf{"a": 1}\n', [(1, {"a": 1})]),
    "CRLF": ('{"a": 1}\r\n{"a": 2}\r\n', [(1, {"a": 1}), (2, {"a": 2})]),
    "line separators in a text": ('{"a": "x\u2028y\x85"}\n', [(1, {"a": "x\u2028y\x85"})]),
    "latin1": (b'{"a": "caf\xe9"}\n{"a": 2}\n', [(1, NOT_UTF8), (2, {"a": 2})]),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), [(1, NOT_UTF8)]),
    "not JSON": (
        "{'a': 1}\n",
        [(1, "not JSON: Expecting property name enclosed in double quotes")],
    ),
    "cut off": ('{"a": "x', [(1, "not JSON: Unterminated string starting at")]),
    "two on a line": ('{"a": 1} {"a": 2}\n', [(1, "not JSON: Extra data")]),
    "pretty-printed": (
        '[\n{"a": 1},\n]\n',
        [
            (1, "not JSON: Expecting value"),
            (2, "not JSON: Extra data"),
            (3, "not JSON: Expecting value"),
        ],
    ),
    "list": ("[1]\n", [(1, "not a JSON object")]),
    "text": ('"a"\n', [(1, "not a JSON object")]),
    "null": ("null\n", [(1, "not a JSON object")]),
    "key twice": ('{"a": 1, "a": 2}\n', [(1, "a key appears twice")]),
    "key twice, inside": ('{"a": [{"b": 1, "b": 1}]}\n', [(1, "a key appears twice")]),
    "too deep": ("[" * 100_000 + "\n{}", [(1, TOO_DEEP), (2, {})]),
}


@pytest.mark.parametrize("name", JSONL)
def test_jsonl(name, tmp_path) -> None:
    content, expected = JSONL[name]
    assert rows_of(tmp_path, "x.jsonl", content) == expected


def test_jsonl_with_a_number_longer_than_python_reads(tmp_path) -> None:
    [(line, reason)] = rows_of(tmp_path, "x.jsonl", '{"a": %s}' % ("1" * 5000))
    assert line == 1
    assert reason.startswith("not JSON: Exceeds the limit (4300 digits)")


CSV = {
    "plain": ("a,b\n1,2\n", [(2, {"a": "1", "b": "2"})]),
    "empty file": ("", []),
    "header alone": ("a,b\n", []),
    "BOM": (b"\xef\xbb\xbfa,b\n1,2\n", [(2, {"a": "1", "b": "2"})]),
    "CRLF": ("a,b\r\n1,2\r\n3,4\r\n", [(2, {"a": "1", "b": "2"}), (3, {"a": "3", "b": "4"})]),
    "empty fields stay": ("a,b\n,\n", [(2, {"a": "", "b": ""})]),
    "quotes and commas": ('a,b\n"x, ""y""",2\n', [(2, {"a": 'x, "y"', "b": "2"})]),
    "header after empty lines": ("\n\na,b\n1,2\n", [(4, {"a": "1", "b": "2"})]),
    "rows of several lines count from their first": (
        'a,b\n"one\n\ntwo",2\n\n3,"x\r\ny"\n5,6\n',
        [
            (2, {"a": "one\n\ntwo", "b": "2"}),
            (6, {"a": "3", "b": "x\r\ny"}),
            (8, {"a": "5", "b": "6"}),
        ],
    ),
    "ragged": ("a,b\n1\n1,2,3\n1,2\n", [(2, RAGGED), (3, RAGGED), (4, {"a": "1", "b": "2"})]),
    "ragged over several lines": (
        'a,b\n1,2,"x\ny"\n3,4\n',
        [(2, RAGGED), (4, {"a": "3", "b": "4"})],
    ),
    "blanks are no empty line": ("a,b\n  \n", [(2, RAGGED)]),
    "long text": (f"a,b\n1,{'x' * 200_000}\n", [(2, {"a": "1", "b": "x" * 200_000})]),
}


@pytest.mark.parametrize("name", CSV)
def test_csv(name, tmp_path) -> None:
    content, expected = CSV[name]
    assert rows_of(tmp_path, "x.csv", content) == expected


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a,b\n1,\xe9\n", CSV_NOT_UTF8),
        ("a,b\n1,2\n".encode("utf-16"), CSV_NOT_UTF8),
        ('a,b\n1,2\n3,"x"y\n', "x.csv:3: not CSV: ',' expected after '\"'"),
        ('a,b\n1,2\n3,"x\n5,6\n7,8\n', "x.csv:3: not CSV: unexpected end of data"),
        ('"a\n', "x.csv:1: not CSV: unexpected end of data"),
        ("a,b,a\n1,2,3\n", "x.csv: a column appears twice in the header: a, b, a"),
    ],
)
def test_csv_that_cannot_be_read_is_refused_as_a_whole(content, text, tmp_path) -> None:
    assert refusal_of(tmp_path, "x.csv", content) == text


def test_parquet(tmp_path) -> None:
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
    rows = [{"messages": turns, "n": 1}, {"messages": None, "n": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=1)
    assert list(read_rows(tmp_path / "x.parquet")) == [(1, rows[0]), (2, rows[1])]


def test_parquet_rows_count_on_over_batches(tmp_path) -> None:
    pq.write_table(pa.table({"n": range(70_000)}), tmp_path / "x.parquet")  # read 65,536 at a time
    *_, last = read_rows(tmp_path / "x.parquet")
    assert last == (70_000, {"n": 69_999})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "x.parquet: not Parquet: Parquet file size is 0 bytes"),
        (
            b'{"prompt": "a", "completion": "b"}\n',
            "x.parquet: not Parquet: Parquet magic bytes not",
        ),
    ],
)
def test_parquet_that_is_none(content, text, tmp_path) -> None:
    assert refusal_of(tmp_path, "x.parquet", content).startswith(text)


@pytest.mark.parametrize("name", ["x.json", "x.txt", "x.tsv", "x.jsonl.gz", "x"])
def test_other_kinds_of_file(name, tmp_path) -> None:
    suffix = name[name.rindex(".") :] if "." in name else ""
    assert refusal_of(tmp_path, name, "") == (
        f"{name}: cannot read {suffix!r} files; known: .jsonl, .csv, .parquet"
    )


# formats

MESSAGES = {"messages": []}
PAIR = {"prompt": "", "completion": ""}


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        (MESSAGES, {}, "messages"),
        (PAIR, {}, "prompt-completion"),
        (PAIR | {"id": 1, "user": 2}, {}, "prompt-completion"),
        (MESSAGES | {"prompt": ""}, {}, "messages"),
        ({"q": "", "a": ""}, {"prompt": "q", "completion": "a"}, "prompt-completion"),
        ({"talk": []}, {"messages": "talk"}, "messages"),
        # a mapped name no longer means what it says
        (PAIR | {"talk": []}, {"messages": "talk", "prompt": "other"}, "messages"),
        ({"messages": "", "a": ""}, {"prompt": "messages", "completion": "a"}, "prompt-completion"),
        # swapped
        (PAIR, {"prompt": "completion", "completion": "prompt"}, "prompt-completion"),
    ],
)
def test_format_is_found_from_the_columns(row, columns, expected) -> None:
    assert find_format(row, "x.csv", columns) == expected


HINT = "Map yours under the dataset, e.g. `columns: {prompt: question, completion: answer}`."


@pytest.mark.parametrize(
    ("row", "columns", "text"),
    [
        (
            MESSAGES | PAIR,
            {},
            "x.csv fits messages and prompt-completion (columns: messages, prompt, completion); "
            "set `format`.",
        ),
        (
            {"question": "", "answer": ""},
            {},
            "x.csv has the columns: question, answer. Needed: `messages`, or `prompt` and "
            f"`completion`. {HINT}",
        ),
        (
            {"prompt": ""},
            {},
            "x.csv has the columns: prompt. Needed: `messages`, or `prompt` and "
            f"`completion`. {HINT}",
        ),
        (
            PAIR,
            {"prompt": "question"},
            "x.csv has the columns: prompt, completion. Needed: `messages`, or `question` and "
            f"`completion`. {HINT}",
        ),
    ],
)
def test_format_that_cannot_be_found(row, columns, text) -> None:
    with pytest.raises(UserError) as caught:
        find_format(row, "x.csv", columns)
    assert str(caught.value) == text


# rows

SYSTEM, USER, BOT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Yes?"},
)


@pytest.mark.parametrize(
    "turns",
    [[USER, BOT], [SYSTEM, USER, BOT], [USER, BOT, USER, BOT], [SYSTEM, USER, BOT, USER, BOT]],
)
@pytest.mark.parametrize("encode", [list, json.dumps], ids=["list", "JSON text"])
def test_conversations_that_can_be_trained_on(turns, encode) -> None:
    assert to_messages({"messages": encode(turns)}, "messages", {}) == turns


def test_other_keys_of_a_turn_are_not_kept() -> None:
    assert to_messages({"messages": [USER | {"id": 3}, BOT]}, "messages", {}) == [USER, BOT]


def test_text_is_kept_as_it_is() -> None:
    row = {"prompt": "  a\n", "completion": "\tb \u0000\U0001f600"}
    assert [m["content"] for m in to_messages(row, "prompt-completion", {})] == list(row.values())


def test_columns_map_our_names_to_the_users() -> None:
    row = {"question": "Hi.", "answer": "Yes?", "prompt": "another"}
    columns = {"prompt": "question", "completion": "answer"}
    assert to_messages(row, "prompt-completion", columns) == [USER, BOT]
    assert to_messages({"talk": [USER, BOT]}, "messages", {"messages": "talk"}) == [USER, BOT]


ORDER = "turns must go [system] user assistant user assistant …, assistant last"
NO_TURNS = "messages is not a list of turns, or is empty"
NO_ROLE = "a turn needs a role: system, user or assistant"
BAD_MESSAGES = {
    "missing": (None, NO_TURNS),
    "no list": ({"role": "user"}, NO_TURNS),
    "number": (3, NO_TURNS),
    "empty": ([], NO_TURNS),
    "text, no JSON": ("Hi.", "messages is text, but not JSON: Expecting value"),
    "empty text": ("", "messages is text, but not JSON: Expecting value"),
    "text, key twice": (
        '[{"role": "user", "role": "user"}]',
        "messages is text, but a key appears twice",
    ),
    "text, too deep": ("[" * 100_000, f"messages is text, but {TOO_DEEP}"),
    "JSON text, no list": ('{"role": "user"}', NO_TURNS),
    "turn is text": (["Hi.", "Yes?"], NO_ROLE),
    "turn is null": ([None], NO_ROLE),
    "no role": ([{"content": "Hi."}], NO_ROLE),
    "role is a list": ([{"role": ["user"], "content": "Hi."}], NO_ROLE),
    "ShareGPT names": ([{"from": "human", "value": "Hi."}], NO_ROLE),
    "tool": ([USER, {"role": "tool", "content": "x"}, BOT], NO_ROLE),
    "no content": ([{"role": "user"}, BOT], "user content is missing"),
    "null content": (
        [USER, {"role": "assistant", "content": None}],
        "assistant content is missing",
    ),
    "content in parts": (
        [{"role": "user", "content": [{"type": "text"}]}, BOT],
        "user content is list, not text",
    ),
    "empty system": ([{"role": "system", "content": ""}, USER, BOT], "system content is empty"),
    "system alone": ([SYSTEM], ORDER),
    "user alone": ([USER], ORDER),
    "assistant alone": ([BOT], ORDER),
    "user last": ([USER, BOT, USER], ORDER),
    "assistant first": ([BOT, USER, BOT], ORDER),
    "two users": ([USER, USER, BOT], ORDER),
    "two assistants": ([USER, BOT, BOT, USER], ORDER),
    "system later": ([USER, BOT, SYSTEM, USER, BOT], ORDER),
    "two systems": ([SYSTEM, SYSTEM, USER, BOT], ORDER),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_conversation_that_cannot_be_used(name) -> None:
    value, reason = BAD_MESSAGES[name]
    with pytest.raises(RowError) as caught:
        to_messages({"messages": value}, "messages", {})
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a"}, "completion is missing"),
        ({"prompt": None, "completion": "b"}, "prompt is missing"),
        ({"prompt": 3, "completion": "b"}, "prompt is int, not text"),
        ({"prompt": "a", "completion": {"intent": "x"}}, "completion is dict, not text"),
        ({"prompt": True, "completion": "b"}, "prompt is bool, not text"),
        ({"prompt": "", "completion": "b"}, "prompt is empty"),
        ({"prompt": "a", "completion": " \n\t\u3000"}, "completion is empty"),
        (
            {"prompt": "a\ud83d", "completion": "b"},
            "prompt holds a lone surrogate, which is no text",
        ),
    ],
)
def test_pair_that_cannot_be_used(row, reason) -> None:
    with pytest.raises(RowError) as caught:
        to_messages(row, "prompt-completion", {})
    assert str(caught.value) == reason


def test_surrogates_that_make_a_pair_are_text(tmp_path) -> None:
    content = '{"prompt": "\\ud83d\\ude00", "completion": "b"}'
    [(_, row)] = rows_of(tmp_path, "x.jsonl", content)
    assert to_messages(row, "prompt-completion", {})[0]["content"] == "\U0001f600"


def test_reject_as_a_line_of_json() -> None:
    text = Reject("é.csv", 7, "prompt is empty").as_json()
    assert text == '{"source": "é.csv", "line": 7, "reason": "prompt is empty"}'
