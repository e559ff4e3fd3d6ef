"""One table over baselines and runs: its columns, rows, TSV and HTML.

Pure: records in, text out. A row is a dict with keys of COLUMNS. What a row lacks is an empty
cell, so no NaN can appear.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from itertools import groupby

from finetune.devices import GB

TEST = "Test split"
TRAINING = "Training"
MEMORY = "Training, GB at most"


@dataclass(frozen=True)
class Column:
    """One column of both files."""

    key: str
    """Header in the TSV, with the unit."""
    title: str = ""
    """Header in the HTML, as HTML. Empty: the TSV alone has it."""
    group: str = ""
    """What the number is about: a second header above the first."""
    show: str = "{}"
    """How the HTML writes the value; it may name other keys of the row."""
    best: Callable | None = None
    """min or max, for a metric that ranks models."""
    text: bool = False
    """Text is set to the left, numbers to the right."""


COLUMNS = (
    Column("name", "name", text=True),
    Column("model", "model", text=True),
    Column("dataset"),
    Column("method", "method", text=True),
    Column("launch", "launch", text=True),
    Column("test_loss_nats_per_token", "loss", TEST, "{:.3f}", min),
    Column("perplexity", "perplexity", TEST, "{:#.4g}", min),
    Column("token_accuracy", "token accuracy", TEST, "{:.1%}", max),
    Column("exact_match", "exact match", TEST, "{:.1%}", max),
    Column("rouge_l", "ROUGE&#8209;L", TEST, "{:.1%}", max),
    Column("json_valid", "valid JSON", TEST, "{:.1%}", max),
    Column("json_equal", "equal JSON", TEST, "{:.1%}", max),
    Column("unfinished_thoughts", "unfinished thoughts", TEST, "{:,}"),
    Column("test_loss_nats_per_row", "loss per row", TEST, "{:.3f}", min),
    Column("accuracy", "accuracy", TEST, "{:.1%}", max),
    Column("macro_f1", "macro F1", TEST, "{:.1%}", max),
    Column("tokens_per_second", "tokens/s", TRAINING, "{:,.0f}"),
    Column("wall_minutes", "minutes", TRAINING, "{:.1f}"),
    Column("world_size", "world size", TRAINING),
    Column("steps", "steps", TRAINING, "{:,}"),
    Column("peak_memory_gb", "per process", MEMORY, "{:.2f} {peak_memory_of}"),
    Column("peak_memory_of"),
    Column("predicted_memory_gb", "predicted", MEMORY, "{:.2f}"),
    Column("corrected_memory_gb", "corrected", MEMORY, "{:.2f}"),
    Column("host_memory_gb", "host, per node", MEMORY, "{:.2f}"),
    Column("predicted_host_gb", "predicted", MEMORY, "{:.2f}"),
    Column("corrected_host_gb", "corrected", MEMORY, "{:.2f}"),
    Column("code", "code", show="{} {code_note}", text=True),
    Column("code_note"),
)

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Baselines and runs compared</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2em; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
caption {{ caption-side: bottom; text-align: left; padding-top: 1em; color: #555; }}
th, td {{ padding: .25em .6em; text-align: right; white-space: nowrap; }}
thead th {{ vertical-align: bottom; font-weight: 500; color: #555; white-space: normal; }}
thead tr:first-child th {{ text-align: center; }}
thead tr:first-child th:not(:empty) {{ border-bottom: 1px solid #ccc; }}
tbody {{ border-top: 1px solid #999; }}
tbody th, .text {{ text-align: left; }}
tbody tr:hover td {{ background: #f3f6f9; }}
h2 {{ font-size: 1.1em; margin: 2em 0 .5em; }}
</style>
<table>
<caption>{caption}</caption>
<thead>
{head}
</thead>
{bodies}
</table>
{sections}</html>
"""
CAPTION = (
    "Bold: best of the data set. Loss: nats per supervised token; it and perplexity compare only "
    "models that share a tokenizer. Loss per row: nats, of classifiers. Percentages: shares of the "
    "test split; for ROUGE&#8209;L the mean F-measure, for macro F1 the mean over classes. "
    "Unfinished thoughts: answers that ended inside one, and count as empty. Class "
    "prior: no model, but how often each class occurs in training. Tokens/s: all processes "
    "together. Minutes: wall time of training, loading included. World size: processes. Steps: "
    "optimizer steps. GB: 1e9 bytes, the most over all starts of the run, of the largest process "
    "(on its GPU, or on the host where there is none) and of all processes on a node's host; as "
    "predicted from shapes, and corrected by what earlier runs had measured. Code: the commit "
    "that trained or, for a base model, evaluated; older code: not all of the row is from the "
    "commit that made this table."
)


def baseline_row(model: str, dataset: str, scores: dict, now: str | None) -> dict:
    """A base model as it came. `now` is the commit of the code that makes the table."""
    method = scores.get("baseline", "base")
    row = {"name": model, "model": model, "dataset": dataset, "method": method}
    return row | score_cells(scores) | code_cells([scores["code"]], now)


def run_row(name: str, facts: dict, scores: dict, now: str | None) -> dict:
    """A run: `facts` is train.json, `scores` its evaluation's metrics.json."""
    row = {
        "name": name,
        "model": facts["model_name"],
        "dataset": facts["dataset_name"],
        "method": facts["settings"]["method"],
        "launch": facts["settings"]["launch"],
        "tokens_per_second": facts["tokens_per_second"],
        "wall_minutes": facts["wall_seconds"] / 60,
        "world_size": facts["world_size"],
        "steps": facts["steps"],
    }
    row |= memory_cells(facts)
    return row | score_cells(scores) | code_cells([facts["code"], scores["code"]], now)


def memory_cells(facts: dict) -> dict:
    """Measured beside predicted."""
    peak, memory = facts["peak_memory"], facts["memory"]
    process, node = memory["process"], memory["node"]
    sizes = {
        "peak_memory_gb": peak.get("gpu", peak["host"]),
        "predicted_memory_gb": process["predicted"],
        "corrected_memory_gb": process["corrected"],
        "host_memory_gb": node["measured"],
        "predicted_host_gb": node["predicted"],
        "corrected_host_gb": node["corrected"],
    }
    known = {key: size / GB for key, size in sizes.items() if size is not None}
    return known | {"peak_memory_of": "GPU" if "gpu" in peak else "host"}


def score_cells(scores: dict) -> dict:
    """The metrics that the data set asks for, and what spoils them."""
    counted = "row" if "accuracy" in scores else "token"
    named = scores | {f"test_loss_nats_per_{counted}": scores["loss"]}
    if named.get("unfinished_thoughts") == 0:  # as nearly everywhere
        del named["unfinished_thoughts"]
    return {c.key: named[c.key] for c in COLUMNS if c.group == TEST and c.key in named}


def code_cells(made_by: list[str | None], now: str | None) -> dict:
    """The commit that made the model, and whether any of this row is from another than `now`."""
    if None in made_by:
        return {"code": "unknown", "code_note": ""}
    short = re.sub("[0-9a-f]{40}", lambda commit: commit[0][:7], made_by[0])
    # two commits marked -dirty can be the same and the code another
    same = all(commit == now and not commit.endswith("-dirty") for commit in made_by)
    return {"code": short, "code_note": "" if same or now is None else "older code"}


def by_dataset(rows: list[dict]) -> dict[str, list[dict]]:
    """Data sets as they first appear, each with its rows in the order given."""
    names = dict.fromkeys(row["dataset"] for row in rows)
    return {name: [row for row in rows if row["dataset"] == name] for name in names}


def used_columns(rows: list[dict]) -> list[Column]:
    """All but the metrics and the memory that no row has."""
    some = (TEST, MEMORY)
    return [c for c in COLUMNS if c.group not in some or any(c.key in row for row in rows)]


def as_tsv(rows: list[dict]) -> str:
    """Values in full precision. Names cannot hold tabs (config.path_safe)."""
    keys = [column.key for column in used_columns(rows)]
    ordered = [row for group in by_dataset(rows).values() for row in group]
    lines = [keys, *([str(row.get(key, "")) for key in keys] for row in ordered)]
    return "".join("\t".join(line) + "\n" for line in lines)


def as_html(rows: list[dict], sections: str = "") -> str:
    """One page with nothing outside it. `sections` come after the table."""
    columns = [column for column in used_columns(rows) if column.title]
    bodies = (table_body(name, group, columns) for name, group in by_dataset(rows).items())
    filled = {"head": table_head(columns), "bodies": "\n".join(bodies), "sections": sections}
    return PAGE.format(caption=CAPTION, **filled)


def table_head(columns: list[Column]) -> str:
    groups = [(name, len(list(same))) for name, same in groupby(columns, lambda c: c.group)]
    above = "".join(f'<th colspan="{size}">{name}</th>' for name, size in groups)
    titles = "".join(f"<th{css(column)}>{column.title}</th>" for column in columns)
    return f"<tr>{above}</tr>\n<tr>{titles}</tr>"


def table_body(name: str, rows: list[dict], columns: list[Column]) -> str:
    """The rows of one data set under its name."""
    winners = {column.key: best_value(rows, column) for column in columns}
    lines = [f'<tr><th colspan="{len(columns)}">{escape(name)}</th></tr>']
    for row in rows:
        cells = (table_cell(row, column, winners[column.key]) for column in columns)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join(["<tbody>", *lines, "</tbody>"])


def best_value(rows: list[dict], column: Column) -> float | None:
    """None where nothing ranks: no metric, one model, or all alike."""
    values = [row[column.key] for row in rows if column.key in row]
    return column.best(values) if column.best and len(set(values)) > 1 else None


def table_cell(row: dict, column: Column, winner: float | None) -> str:
    if column.key not in row:
        return "<td></td>"
    value = row[column.key]
    text = escape(column.show.format(value, **row).strip())
    return f"<td{css(column)}>{f'<b>{text}</b>' if value == winner else text}</td>"


def css(column: Column) -> str:
    return ' class="text"' if column.text else ""
