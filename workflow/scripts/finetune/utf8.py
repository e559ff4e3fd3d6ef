"""Files that are not UTF-8: seen, and told what they seem to be in."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from itertools import islice
from typing import IO

from finetune.json_text import BrokenFileError

WIDE = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order marks. UTF-32 comes first: one of its marks starts with one of UTF-16's."""
FEW = 10
COMMON = ("cp1252", "cp1251", "koi8_r", "shift_jis", "euc_jp", "gb18030", "big5", "euc_kr")


def not_utf8_lines(lines: Iterable[bytes]) -> tuple[int, bytes]:
    """The number of the first line that is not UTF-8, and some such lines to tell the encoding
    from: the others of the file could be anything."""
    found = ((number, line) for number, line in enumerate(lines, 1) if not is_utf8(line))
    first, line = next(found)
    return first, line + b"".join(other for _, other in islice(found, 100))


def is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def name_encoding(data: bytes) -> str | None:
    """A likely encoding of text that is not UTF-8. A few odd letters tell nothing; most often
    they are of Western Europe."""
    from charset_normalizer import from_bytes

    if sum(byte > 127 for byte in data[:20_000]) < FEW and b"\0" not in data:
        return COMMON[0]
    best = from_bytes(data[:20_000], cp_isolation=list(COMMON)).best()
    return best.encoding if best else None


def not_utf8(encoding: str | None) -> str:
    seems = f" (it looks like {encoding})" if encoding else ""
    return f"not UTF-8{seems}; convert the file: iconv -f {encoding or 'latin1'} -t utf-8"


def refuse_wide(file: IO[bytes]) -> None:
    """UTF-16 has line breaks of two bytes, so lines could not even be counted."""
    start = file.read(4)
    file.seek(0)
    name = next((name for mark, name in WIDE.items() if start.startswith(mark)), None)
    if name is None and b"\0" in start[:2]:  # an ASCII letter without a mark before it
        name = "utf-16be" if start[0] == 0 else "utf-16le"
    if name:
        raise BrokenFileError(not_utf8(name))
