"""Rule compare: every run and every base model side by side.

Reads `train.json`, `metrics.jsonl` and `evaluation/metrics.json` of each run, and `metrics.json`
of each baseline. Writes `summary.tsv` (full precision), `summary.html` (to read), `loss.svg` and
`memory.svg`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.class_tables import sections
from finetune.cli import UserError, run_script, say
from finetune.files import read_json, write_aside
from finetune.provenance import code_commit
from finetune.summary import as_html, as_tsv, baseline_row, by_dataset, run_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

TEXT_SCORES = ("loss", "perplexity", "token_accuracy", "code")
CLASS_SCORES = ("loss", "accuracy", "macro_f1", "per_class", "confusion_matrix", "code")
FACTS = (
    *("model_name", "dataset_name", "settings", "tokens_per_second", "peak_memory"),
    *("predicted_memory", "wall_seconds", "world_size", "steps", "code"),
)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito 2008, without yellow: told apart whatever the reader's colour vision."""
DASHES = ("-", "--", ":", "-.")
"""When the colours are used up, the same ones come again with the next dash."""
STYLE = {
    "svg.hashsalt": "finetune",  # ids by content: the same figure is the same file
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="append", required=True, type=named, help="NAME:DIR")
    parser.add_argument(
        "--baseline", action="append", default=[], type=named, help="MODEL/DATASET:DIR"
    )
    parser.add_argument("--output", required=True, type=Path, help="report/")
    args = parser.parse_args()

    now = code_commit()
    baselines = [read_baseline(name, folder, now) for name, folder in args.baseline]
    scores = [load_scores(folder / "evaluation" / "metrics.json") for _, folder in args.run]
    runs = [
        run_row(name, load(folder / "train.json", FACTS), found, now)
        for (name, folder), found in zip(args.run, scores, strict=True)
    ]
    curves = {name: read_curves(folder / "metrics.jsonl") for name, folder in args.run}
    rows = baselines + runs  # in this order under each data set
    write_text(args.output / "summary.tsv", as_tsv(rows))
    write_text(args.output / "summary.html", as_html(rows, sections(runs, scores)))
    write_figure(args.output / "loss.svg", loss_figure(runs, curves))
    write_figure(args.output / "memory.svg", memory_figure(runs))
    say(f"compare: runs: {len(runs)}, baselines: {len(baselines)}; see {args.output}")


def named(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition(":")
    if not (name and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:FOLDER")
    return name, Path(folder)


def read_baseline(name: str, folder: Path, now: str | None) -> dict:
    model, _, dataset = name.partition("/")
    if not dataset:
        raise UserError(f"--baseline {name}:{folder} must start with MODEL/DATASET")
    return baseline_row(model, dataset, load_scores(folder / "metrics.json"), now)


def load_scores(path: Path) -> dict:
    """metrics.json of a model that writes text, or of a classifier."""
    classifier = "accuracy" in load(path, ("loss",))
    return load(path, CLASS_SCORES if classifier else TEXT_SCORES)


def load(path: Path, keys: tuple[str, ...]) -> dict:
    """A record that has what the table needs."""
    with readable(path):
        record = read_json(path)
    if missing := [key for key in keys if key not in record]:
        raise UserError(
            f"{path} lacks {', '.join(missing)}: other code wrote it. "
            f"Have it made again: snakemake --force {path}"
        )
    return record


def read_curves(path: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of training and validation loss. A step logged twice counts once, as last."""
    with readable(path), open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return {
        key: sorted({line["step"]: line[key] for line in lines if key in line}.items())
        for key in ("loss", "eval_loss")
    }


@contextmanager
def readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path} is missing. Have it made: snakemake {path}") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(
            f"{path} is not JSON ({error}). Have it made again: snakemake --force {path}"
        ) from None


def write_text(path: Path, text: str) -> None:
    with write_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_figure(path: Path, figure: Figure) -> None:
    with write_aside(path) as aside:
        figure.savefig(aside, format="svg", metadata={"Date": None})


def blank(panels: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of stacked panels, drawn without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, list(figure.subplots(panels, squeeze=False)[:, 0])


def loss_figure(runs: list[dict], curves: dict[str, dict]) -> Figure:
    """One panel a data set: lines for training loss, diamonds for validation loss."""
    panels = by_dataset(runs)
    legend = 1 + 0.22 * max(map(len, panels.values()))
    figure, axes = blank(len(panels), max(3.6, legend) * len(panels))
    for panel, (dataset, rows) in zip(axes, panels.items(), strict=True):
        names = [row["name"] for row in rows]
        lines = [draw_curves(panel, curves[name], place) for place, name in enumerate(names)]
        # both named: a label of its own would drop a run whose name starts with "_"
        panel.legend(lines, names, loc="upper left", bbox_to_anchor=(1, 1))
        panel.set_title(f"Loss on {dataset}: training (lines), validation (diamonds)")
        panel.set_xlabel("optimizer step")
        panel.xaxis.get_major_locator().set_params(integer=True)
        per_row = any("accuracy" in row for row in rows)
        panel.set_ylabel(f"loss (nats per {'row' if per_row else 'supervised token'})")
    return figure


def draw_curves(panel: Axes, curves: dict, place: int) -> Line2D:
    """The run's training line. Its place in the panel chooses the look."""
    colour = COLOURS[place % len(COLOURS)]
    dash = DASHES[place // len(COLOURS) % len(DASHES)]
    # dots where they are few: a run that logged once shows too
    dot = "." if len(curves["loss"]) <= 50 else ""
    [line] = panel.plot(*columns(curves["loss"]), dash, color=colour, lw=1.2, marker=dot)
    look = {"color": colour, "markeredgecolor": "white", "zorder": 3}
    panel.plot(*columns(curves["eval_loss"]), "D", **look)
    return line


def columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Steps and values; both empty where nothing was logged."""
    return [step for step, _ in points], [value for _, value in points]


def memory_figure(runs: list[dict]) -> Figure:
    """Two bars a run. What a CPU run took is hatched: the prediction is not about the host."""
    figure, [panel] = blank(1, 1.6 + 0.6 * len(runs))
    draw_bars(panel, runs, "predicted_memory_gb", -0.2, "predicted, GPU", color="#56b4e9")
    for kind, hatch in (("GPU", None), ("host", "///")):
        taken = [row if row["peak_memory_of"] == kind else {} for row in runs]
        label = f"measured, {kind}"
        draw_bars(panel, taken, "peak_memory_gb", 0.2, label, color="#e69f00", hatch=hatch)
    panel.set_yticks(range(len(runs)), [row["name"] for row in runs])
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set_title("Peak memory of the largest process in training: predicted and measured")
    panel.set_xlabel("memory (GB = 1e9 bytes)")
    panel.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draw_bars(
    panel: Axes, rows: list[dict], key: str, shift: float, label: str, **look: str | None
) -> None:
    """A bar for each row that has the key, with its value at the end."""
    places = [place + shift for place, row in enumerate(rows) if key in row]
    if places:
        values = [row[key] for row in rows if key in row]
        bars = panel.barh(places, values, 0.38, label=label, edgecolor="white", **look)
        panel.bar_label(bars, fmt="%.2f", padding=3, fontsize="small")


if __name__ == "__main__":
    run_script(main)
