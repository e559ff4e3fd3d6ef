"""Text of others in a page: escaped, and nothing in it that cannot be seen."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

SIGNS = {"\n": "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\t": "\N{RIGHTWARDS ARROW}"}
UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\xa0\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Controls, odd spaces, marks of direction, and halves of a character, which no file can hold.

Not the joiners U+200C and U+200D: Persian words and emoji need them.
"""


def visible(text: str) -> Markup:
    """Escaped, with a sign for every character that cannot be seen. A filter of the templates."""
    return Markup(UNSEEN.sub(lambda match: sign(match[0]), escape(text)))


def sign(character: str) -> str:
    """A line break or tab follows its sign, so the text keeps its shape."""
    if character in SIGNS:
        return f"<i>{SIGNS[character]}</i>{character}"
    return f"<i>U+{ord(character):04X}</i>"
