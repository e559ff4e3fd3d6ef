"""The figures of the report: losses, with what befell the runs, and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.summary import by_dataset

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito 2008, without yellow: told apart whatever the reader's colour vision."""
DASHES = ("-", "--", ":", "-.")
"""When the colours are used up, the same ones come again with the next dash."""
EVENTS = {"resumed": "-", "out of memory": ":", "stopped": "--", "killed": "--", "failed": "--"}
"""What of a run's history the loss figure shows, as vertical lines."""
MEASURED = "#e69f00"
BAR = 0.26
"""Of the height of a row: three fit."""
STYLE = {
    "svg.hashsalt": "finetune",  # ids by content: the same figure is the same file
    "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


def blank(panels: int, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of stacked panels, drawn without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, list(figure.subplots(panels, squeeze=False)[:, 0])


def loss_figure(runs: list[dict], curves: dict[str, dict], events: dict[str, list[dict]]) -> Figure:
    """One panel a data set: lines for training loss, diamonds for validation loss, and thin
    vertical lines, in the run's colour, where it was disturbed."""
    panels = by_dataset(runs)
    legend = 1 + 0.22 * max(map(len, panels.values()))
    figure, axes = blank(len(panels), max(3.6, legend) * len(panels))
    for panel, (dataset, rows) in zip(axes, panels.items(), strict=True):
        names = [row["name"] for row in rows]
        lines = [draw_curves(panel, curves[name], place) for place, name in enumerate(names)]
        for line, name in zip(lines, names, strict=True):
            draw_events(panel, events.get(name, []), line.get_color())
        befell = {event["event"] for name in names for event in events.get(name, [])}
        kinds = [kind for kind in EVENTS if kind in befell]
        lines += [event_line(kind) for kind in kinds]
        # both named: a label of its own would drop a run whose name starts with "_"
        panel.legend(lines, [*names, *kinds], loc="upper left", bbox_to_anchor=(1, 1))
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


def draw_events(panel: Axes, events: list[dict], colour: str) -> None:
    for event in events:
        if event["event"] in EVENTS:
            panel.axvline(event["step"], ls=EVENTS[event["event"]], lw=0.7, color=colour, alpha=0.7)


def event_line(kind: str) -> Line2D:
    """For the legend: grey, since each run has its own colour."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color="#777777", lw=0.7, ls=EVENTS[kind])


def columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Steps and values; both empty where nothing was logged."""
    return [step for step, _ in points], [value for _, value in points]


def memory_figure(runs: list[dict]) -> Figure:
    """Predicted, corrected and measured, a bar each a run: of the largest process, and of a node's
    host. Where the process was on the host its bar is hatched."""
    figure, panels = blank(2, 2 * (1.3 + 0.7 * len(runs)))
    process, node = panels
    draw_predictions(process, runs, "predicted_memory_gb", "corrected_memory_gb")
    draw_predictions(node, runs, "predicted_host_gb", "corrected_host_gb")
    for kind, hatch in (("GPU", None), ("host", "///")):
        taken = [row if row["peak_memory_of"] == kind else {} for row in runs]
        draw_bars(process, taken, "peak_memory_gb", 1, f"measured, {kind}", MEASURED, hatch)
    draw_bars(node, runs, "host_memory_gb", 1, "measured, host", MEASURED, "///")
    process.set_title("Peak memory in training: the largest process")
    node.set_title("All processes, on the host of a node")
    for panel in panels:
        panel.set_yticks(range(len(runs)), [row["name"] for row in runs])
        panel.set_ylim(len(runs) - 0.5, -0.5)
        panel.margins(x=0.12)
        panel.set_xlabel("memory (GB = 1e9 bytes)")
        panel.legend(*panel.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def draw_predictions(panel: Axes, runs: list[dict], predicted: str, corrected: str) -> None:
    draw_bars(panel, runs, predicted, -1, "predicted", "#56b4e9")
    draw_bars(panel, runs, corrected, 0, "corrected by earlier runs", "#009e73")


def draw_bars(
    panel: Axes,
    rows: list[dict],
    key: str,
    place: int,
    label: str,
    colour: str,
    hatch: str | None = None,
) -> None:
    """A bar for each row that has the key, with its value at the end. Of three places a row has,
    this is -1, 0 or 1."""
    places = [row + place * BAR for row, one in enumerate(rows) if key in one]
    if places:
        values = [row[key] for row in rows if key in row]
        look = {"color": colour, "hatch": hatch, "edgecolor": "white"}
        bars = panel.barh(places, values, BAR, label=label, **look)
        panel.bar_label(bars, fmt="%.2f", padding=3, fontsize="small")
