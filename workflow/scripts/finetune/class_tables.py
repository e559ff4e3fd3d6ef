"""For each classifier, what it makes of each class: F1, and which classes it takes for others."""

from __future__ import annotations

from html import escape

CAPTION = (
    "Precision: share of the rows given this class that have it. Recall: share of the rows of this "
    "class that are given it. F1: their harmonic mean. To the right of rows, the confusion matrix: "
    "rows of this class by the class that they are given; right ones bold."
)
SECTION = """\
<h2>{name} on {dataset}: classes</h2>
<table>
<caption>{caption}</caption>
<thead>
<tr>{titles}</tr>
</thead>
<tbody>
{rows}
</tbody>
</table>
"""
SHARES = ("precision", "recall", "f1")


def sections(rows: list[dict], scores: list[dict]) -> str:
    """HTML after the table: a section for each row of the table whose scores have classes."""
    pairs = zip(rows, scores, strict=True)
    return "".join(section(row, found) for row, found in pairs if "per_class" in found)


def section(row: dict, scores: dict) -> str:
    matrix = scores["confusion_matrix"]
    titles = ["class", *SHARES, "rows", *map(escape, matrix["labels"])]
    lines = [
        class_line(place, label, scores["per_class"][label], matrix["counts"][place])
        for place, label in enumerate(matrix["labels"])
    ]
    return SECTION.format(
        name=escape(row["name"]),
        dataset=escape(row["dataset"]),
        caption=CAPTION,
        titles="".join(f"<th>{title}</th>" for title in titles).replace("<th>", LEFT, 1),
        rows="\n".join(lines),
    )


LEFT = '<th class="text">'


def class_line(place: int, label: str, scores: dict, counts: list[int]) -> str:
    """One class. Pairs that never occur are left blank, so that mistakes stand out."""
    cells = [f"{scores[name]:.1%}" for name in SHARES] + [f"{scores['rows']:,}"]
    for given, count in enumerate(counts):
        text = f"{count:,}" if count else ""
        cells.append(f"<b>{text}</b>" if given == place and count else text)
    return f"<tr>{LEFT}{escape(label)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
