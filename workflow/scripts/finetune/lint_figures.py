"""Figures of the data check as inline SVG: lengths of the training examples, sizes of classes.

Pure: counts in, HTML out. Heights and widths are proportional to counts.
"""

from __future__ import annotations

import math

from finetune.checks import percent
from finetune.visible import visible

LEFT, TOP, WIDTH, HEIGHT = 70, 30, 620, 180
"""Of the plot, inside the labels of its axes."""
FAR = 1.5
"""A limit further out than this, as a share of the longest, would squeeze the bars."""
CLASS_WIDTH = 300

HISTOGRAM = """\
<svg role="img" aria-labelledby="lengths" viewBox="0 0 {width} {height}" style="width: {width}px">
<title id="lengths">{title}</title>
{body}
<text class="axis" x="{middle}" y="{below}" text-anchor="middle">tokens per example</text>
<text class="axis" transform="translate(14 {half}) rotate(-90)" text-anchor="middle">\
training examples</text>
</svg>"""

CLASSES = """\
<table>
<thead><tr><th scope="col" class="text">class</th>\
<th scope="col">training rows</th><th scope="col">share</th><td></td></tr></thead>
<tbody>
{rows}
</tbody>
</table>"""


def histogram(edges: list[int], counts: list[int], max_length: int) -> str:
    """Bars over a linear axis of tokens that starts at 0, and the limit as a dashed line."""
    if sum(counts) == 0:
        return "<p>No training examples.</p>"
    longest = max(edges[-1], 1)
    right = max_length if longest < max_length <= FAR * longest else longest
    parts = [axes(right, max(counts)), *bars(edges, counts, right), limit_mark(max_length, right)]
    return HISTOGRAM.format(
        width=LEFT + WIDTH + 30,
        height=TOP + HEIGHT + 50,
        middle=LEFT + WIDTH / 2,
        below=TOP + HEIGHT + 42,
        half=TOP + HEIGHT / 2,
        title=f"How many of {sum(counts):,} training examples have how many tokens before cutting; "
        f"max_length is {max_length:,}",
        body="\n".join(parts),
    )


def bars(edges: list[int], counts: list[int], right: int) -> list[str]:
    """One for each bin that is not empty. The title shows under the pointer."""
    bins = zip(edges, edges[1:], counts, strict=False)
    return [bar(low, high, count, max(counts), right) for low, high, count in bins if count]


def bar(low: int, high: int, count: int, most: int, right: int) -> str:
    height = HEIGHT * count / most
    width = max(WIDTH * (high - low) / right - 1, 1)  # the gap parts it from the next
    return (
        f'<rect class="bar" x="{across(low, right):.1f}" y="{TOP + HEIGHT - height:.2f}" '
        f'width="{width:.1f}" height="{height:.2f}">'
        f"<title>{low:,} to {high:,} tokens: {count:,}</title></rect>"
    )


def across(tokens: int, right: int) -> float:
    return LEFT + WIDTH * tokens / right


def axes(right: int, most: int) -> str:
    """Ticks with numbers, and a thin line for each count."""
    bottom = TOP + HEIGHT
    lines = [
        f'<text class="tick" x="{across(tick, right):.1f}" y="{bottom + 18}" '
        f'text-anchor="middle">{tick:,}</text>'
        for tick in ticks(right)
    ]
    for tick in ticks(most):
        y = bottom - HEIGHT * tick / most
        lines += [
            f'<path class="grid" d="M{LEFT} {y:.1f}h{WIDTH}"/>',
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,}</text>',
        ]
    return "\n".join(lines)


def ticks(top: int, about: int = 5) -> range:
    """Whole and round: steps of 1, 2 or 5 times a power of ten."""
    rough = top / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    return range(0, top + 1, max(1, round(step)))


def limit_mark(max_length: int, right: int) -> str:
    """A dashed line at max_length, or an arrow to where it would be."""
    if max_length > right:
        text, end = f"max_length {max_length:,} \N{RIGHTWARDS ARROW}", LEFT + WIDTH
        return f'<text class="limit" x="{end}" y="{TOP - 10}" text-anchor="end">{text}</text>'
    x = across(max_length, right)
    side = "end" if x > LEFT + WIDTH / 2 else "start"
    return (
        f'<path class="limit" d="M{x:.1f} {TOP - 6}V{TOP + HEIGHT}"/>'
        f'<text class="limit" x="{x:.1f}" y="{TOP - 10}" text-anchor="{side}">'
        f"max_length {max_length:,}</text>"
    )


def class_bars(labels: list[str], counts: list[int]) -> str:
    """Training rows of each class, the largest first."""
    order = sorted(zip(labels, counts, strict=True), key=lambda pair: -pair[1])
    most, total = max(1, *counts), max(1, sum(counts))
    rows = (
        f'<tr><th scope="row">{visible(label)}</th><td>{count:,}</td>'
        f'<td>{percent(count / total)}</td><td class="text">{class_bar(count / most)}</td></tr>'
        for label, count in order
    )
    return CLASSES.format(rows="\n".join(rows))


def class_bar(share: float) -> str:
    return (
        f'<svg aria-hidden="true" width="{CLASS_WIDTH}" height="12">'
        f'<rect class="bar" width="{CLASS_WIDTH * share:.1f}" height="12"/></svg>'
    )
