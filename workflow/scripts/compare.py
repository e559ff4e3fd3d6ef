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

from finetune.cli import UserError, run_again, run_script, say
from finetune.figures import loss_figure, memory_figure
from finetune.files import read_json, write_aside
from finetune.provenance import code_commit
from finetune.summary import as_html, as_tsv, baseline_row, run_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT_SCORES = ("loss", "perplexity", "token_accuracy", "code")
CLASS_SCORES = ("loss", "accuracy", "macro_f1", "per_class", "confusion_matrix", "code")
FACTS = (
    *("model_name", "dataset_name", "settings", "tokens_per_second", "peak_memory", "memory"),
    *("wall_seconds", "world_size", "steps", "events", "code"),
)


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
    facts = {name: load(folder / "train.json", FACTS) for name, folder in args.run}
    runs = [run_row(n, f, found, now) for (n, f), found in zip(facts.items(), scores, strict=True)]
    curves = {name: read_curves(folder / "metrics.jsonl") for name, folder in args.run}
    events = {name: f["events"] for name, f in facts.items()}
    pairs = zip(runs, scores, strict=True)
    classifiers = [(row, found) for row, found in pairs if "per_class" in found]
    rows = baselines + runs  # in this order under each data set
    write_text(args.output / "summary.tsv", as_tsv(rows))
    write_text(args.output / "summary.html", as_html(rows, classifiers))
    write_figure(args.output / "loss.svg", loss_figure(runs, curves, events))
    write_figure(args.output / "memory.svg", memory_figure(runs))
    say(f"runs: {len(runs)}, baselines: {len(baselines)}; see {args.output}")


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
            f"{run_again(f'--forcerun {path}')}."
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
        raise UserError(f"{path} is missing. {run_again(f'--forcerun {path}')}.") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(
            f"{path} is not JSON ({error}). {run_again(f'--forcerun {path}')}."
        ) from None


def write_text(path: Path, text: str) -> None:
    with write_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_figure(path: Path, figure: Figure) -> None:
    with write_aside(path) as aside:
        figure.savefig(aside, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    run_script(main)
