"""The table of the data check: one column a split, and what holds for all of them.

Pure: `lint.json` in, HTML out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from finetune.checks import CAUSAL, percent
from finetune.splits import SPLITS
from finetune.visible import visible

NOTHING = "\N{EN DASH}"

TABLE = """\
<table>
<caption>{caption}</caption>
<thead><tr><td></td>{head}</tr></thead>
{bodies}
</table>"""


@dataclass(frozen=True)
class Line:
    """One figure of every split."""

    title: str
    show: Callable[[dict], str]
    task: str | None = None
    """The only task it is for. None: all."""


def share(part: int, whole: int) -> str:
    return percent(part / whole) if whole else NOTHING


def counted(part: int, whole: int) -> str:
    """A count with its share, where there is something to count."""
    return f"{part:,} ({share(part, whole)})" if part else "0"


def length(key: str) -> Callable[[dict], str]:
    """A quantile. No example has none."""
    return lambda split: f"{split['quantiles'][key]:,}" if split["examples"] else NOTHING


ROWS = (
    Line("rows read", lambda s: f"{s['rows']:,}"),
    Line("left out: too long", lambda s: counted(s["dropped"]["too_long"], s["rows"])),
    Line(
        "left out: nothing to learn from",
        lambda s: counted(s["dropped"]["unsupervised"], s["rows"]),
        CAUSAL,
    ),
    Line("cut to max_length", lambda s: counted(s["truncated"], s["rows"])),
    Line(
        "made into several examples, since the template rewrites earlier turns",
        lambda s: counted(s["rewritten"], s["rows"]),
        CAUSAL,
    ),
    Line("hold control tokens of the model", lambda s: counted(s["control_tokens"], s["rows"])),
)
EXAMPLES = (
    Line("examples", lambda s: f"{s['examples']:,}"),
    Line("start with BOS", lambda s: counted(s["with_bos"], s["examples"])),
    Line(
        "end a turn, of those not cut at the end", lambda s: share(s["ended"], s["endings"]), CAUSAL
    ),
    Line("sequences, packed or not", lambda s: f"{s['sequences']:,}"),
)
TOKENS = (
    Line("tokens", lambda s: f"{s['tokens']:,}"),
    Line("supervised", lambda s: share(s["supervised_tokens"], s["tokens"]), CAUSAL),
    Line("before cutting: median (p50)", length("p50")),
    Line("before cutting: p90", length("p90")),
    Line("before cutting: p99", length("p99")),
    Line("longest", lambda s: f"{s['longest']:,}"),
    Line("EOS tokens", lambda s: f"{s['eos_tokens']:,}"),
    Line("empty thoughts that are learned", lambda s: f"{s['empty_thoughts']:,}", CAUSAL),
)


def split_table(lint: dict) -> str:
    """All of it, in groups."""
    groups = {"Rows": ROWS, "Examples made of them": EXAMPLES, "Tokens": TOKENS}
    bodies = [
        table_body("Preparation", preparation(lint["prepared"])),
        *(table_body(name, split_lines(lines, lint)) for name, lines in groups.items()),
        table_body("Packing", packing(lint["packing"])),
    ]
    head = "".join(f'<th scope="col">{name}</th>' for name in SPLITS)
    return TABLE.format(caption=made_with(lint["settings"]), head=head, bodies="\n".join(bodies))


def table_body(name: str, lines: list[str]) -> str:
    above = f'<tr><th scope="rowgroup" colspan="{1 + len(SPLITS)}">{name}</th></tr>'
    return "\n".join(["<tbody>", above, *lines, "</tbody>"])


def split_lines(lines: tuple[Line, ...], lint: dict) -> list[str]:
    return [
        table_row(line.title, *(line.show(lint[split]) for split in SPLITS))
        for line in lines
        if line.task in (None, lint["task"])
    ]


def table_row(title: str, *cells: str) -> str:
    """Cells of their own for the splits, or one for all."""
    span = f' class="all" colspan="{len(SPLITS)}"' if len(cells) == 1 else ""
    shown = "".join(f"<td{span}>{visible(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{visible(title)}</th>{shown}</tr>'


def preparation(prepared: dict) -> list[str]:
    """What prepare_data left out before rows were split, and what two splits share."""
    overlap = counted(prepared["overlap"], prepared["rows"]["test"])
    rejected = [f"{rows:,} x {why}" for why, rows in prepared["rejected"].items()]
    return [
        table_row("rejected", "; ".join(rejected) or "0"),
        table_row("duplicates left out", f"{prepared['duplicates']:,}"),
        table_row("test rows with a prompt that is trained on", "", "", overlap),
    ]


def packing(packed: dict) -> list[str]:
    """How full a batch is. `padding` is a share of the positions that are computed."""
    used = "used" if packed["used"] else "not asked for"
    if packed["asked"] and not packed["used"]:
        used = f"asked for, but not used: {packed['why_not']}"
    after = packed["used"] and packed["efficiency"] is not None
    return [
        table_row("packing", used),
        table_row("padding, rows in random order", percent(packed["padding_before"])),
        *([table_row("padding, packed", percent(packed["padding_after"]))] if after else []),
        *([table_row("packing efficiency", percent(packed["efficiency"]))] if after else []),
    ]


def made_with(settings: dict) -> str:
    """The settings that say something, as a sentence."""
    said = (
        f"{key}: {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
        if value not in (None, {})
    )
    return visible(f"Made with {', '.join(said)}.")
