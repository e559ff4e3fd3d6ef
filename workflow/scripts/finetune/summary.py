"""One table over baselines and runs: its columns, rows, TSV and HTML.

Pure: records in, text out. A row is a dict with keys of COLUMNS. What a row lacks is an empty
cell, so no NaN can appear.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from finetune.devices import GB
from finetune.pages import render

TEST = "Test split"
TRAINING = "Training"
MEMORY = "Training, GB at most"


@dataclass(frozen=True)
class Column:
    """One column of both files."""

    key: str
    """Header in the TSV, with the unit."""
    title: str = ""
    """Header in the HTML. Empty: the TSV alone has it."""
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
    Column("rouge_l", "ROUGE\N{NON-BREAKING HYPHEN}L", TEST, "{:.1%}", max),
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


def as_html(rows: list[dict], classifiers: Sequence[tuple[dict, dict]] = ()) -> str:
    """The page of `summary.html.j2`. `classifiers`: rows of runs with the scores of each class."""
    columns = [column for column in used_columns(rows) if column.title]
    return render(
        "summary.html.j2",
        title="Baselines and runs compared",
        columns=columns,
        groups=[(name, len(list(same))) for name, same in groupby(columns, lambda c: c.group)],
        datasets={name: cells(group, columns) for name, group in by_dataset(rows).items()},
        classifiers=classifiers,
    )


def cells(rows: list[dict], columns: list[Column]) -> list[list[tuple[Column, str, bool]]]:
    """For each row of a data set and each column, the text and whether it is the best."""
    best = {column.key: best_value(rows, column) for column in columns}
    return [
        [(c, shown(row, c), c.key in row and row[c.key] == best[c.key]) for c in columns]
        for row in rows
    ]


def shown(row: dict, column: Column) -> str:
    return column.show.format(row[column.key], **row).strip() if column.key in row else ""


def best_value(rows: list[dict], column: Column) -> float | None:
    """None where nothing ranks: no metric, one model, or all alike."""
    values = [row[column.key] for row in rows if column.key in row]
    return column.best(values) if column.best and len(set(values)) > 1 else None
