"""The readable page of the data check: verdict, counts, lengths, and samples with their mask.

Pure: `lint.json` in, one HTML page with nothing outside it out. What means something by its
colour means it by a sign, a word or a line too, for black-and-white print.
"""

from __future__ import annotations

from html import escape

from finetune.checks import CAUSAL, notices
from finetune.lint_figures import class_bars, histogram
from finetune.lint_table import split_table
from finetune.splits import SPLITS
from finetune.visible import LINE_BREAK, TAB, visible

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Data check: {title}</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2em;
  max-width: 60em; print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
h1 {{ font-size: 1.6em; }}
h2 {{ font-size: 1.25em; margin: 2em 0 .5em; }}
h3, h4 {{ font-size: 1em; margin: 1.2em 0 .4em; }}
h4 {{ font-weight: 500; color: #555; overflow-wrap: anywhere; }}
.verdict {{ padding: .8em 1em; border: 2px solid; border-left-width: 10px; }}
.verdict h2, .verdict p {{ margin: 0; }}
.verdict ul {{ margin: .5em 0 0; padding-left: 1.2em; }}
.passed {{ border-color: #2a7d3f; background: #eef8f0; }}
.failed {{ border-color: #b3261e; border-style: double; border-width: 4px 4px 4px 12px;
  background: #fdf0ef; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
caption {{ caption-side: bottom; text-align: left; padding-top: 1em; color: #555;
  overflow-wrap: anywhere; }}
th, td {{ padding: .2em .7em; text-align: right; vertical-align: top; }}
thead th {{ font-weight: 500; color: #555; }}
tbody {{ border-top: 1px solid #999; }}
th[scope=row] {{ text-align: left; font-weight: 400; min-width: 9em; overflow-wrap: anywhere; }}
th[scope=rowgroup], .text {{ text-align: left; }}
td.all {{ text-align: center; overflow-wrap: anywhere; }}
svg {{ max-width: 100%; font: 12px system-ui, sans-serif; }}
.bar {{ fill: #3b6ea5; }}
.grid {{ stroke: #ddd; fill: none; }}
path.limit {{ stroke: #b3261e; stroke-width: 2; stroke-dasharray: 6 4; fill: none; }}
text.limit {{ fill: #b3261e; font-weight: 600; }}
pre {{ font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 22em; overflow: auto; border: 1px solid #bbb; padding: .6em; margin: 0; }}
mark {{ color: inherit; background: #cfe8ff; text-decoration: underline; }}
i {{ font-style: normal; color: #777; }}
</style>
</head>
<body>
<h1>Data check: {title}</h1>
{verdict}
{notices}<h2>Counts</h2>
{table}
<h2>Length of the training examples</h2>
{lengths}
{classes}<h2>Samples</h2>
<p>{legend}</p>
{samples}
</body>
</html>
"""

SIGNS = (
    f"{LINE_BREAK} is a line break, {TAB} a tab; other grey signs, such as <i>U+200B</i>, stand "
    "for characters that cannot be seen."
)
BOX = 'tabindex="0" role="group" aria-label="sample" dir="auto"'
LEGENDS = {
    True: f"<mark>Marked</mark> text is trained on, the rest is only read. {SIGNS}",
    False: f"The model reads this text and learns the label above it. {SIGNS}",
}


def lint_page(title: str, lint: dict, failed: list[str]) -> str:
    """`failed` is what checks.failed_checks says."""
    classes = ""
    if lint["labels"] is not None:
        bars = class_bars(lint["labels"], lint["label_counts"])
        classes = f"<h2>Classes</h2>\n{bars}\n"
    train = lint["train"]["histogram"]
    return PAGE.format(
        title=escape(title),
        verdict=verdict(failed),
        notices="".join(f"<p><strong>Note:</strong> {visible(n)}</p>\n" for n in notices(lint)),
        table=split_table(lint),
        lengths=histogram(train["edges"], train["counts"], lint["settings"]["max_length"]),
        classes=classes,
        legend=LEGENDS[lint["task"] == CAUSAL],
        samples="\n".join(split_samples(split, lint[split]["samples"]) for split in SPLITS),
    )


def verdict(failed: list[str]) -> str:
    """First of all, whether a run on this data will start."""
    if not failed:
        return '<p class="verdict passed"><strong>\N{CHECK MARK} All checks passed.</strong></p>'
    count = "1 check" if len(failed) == 1 else f"{len(failed)} checks"
    lines = "\n".join(f"<li>{visible(line)}</li>" for line in failed)
    return (
        f'<div class="verdict failed">\n<h2>\N{BALLOT X} {count} failed: runs on this data will '
        f"not start</h2>\n<ul>\n{lines}\n</ul>\n</div>"
    )


def split_samples(split: str, samples: list[dict]) -> str:
    shown = [sample_box(sample) for sample in samples] or ["<p>None.</p>"]
    return "\n".join([f"<h3>{split}</h3>", *shown])


def sample_box(sample: dict) -> str:
    """A long sample scrolls in its box, which the keyboard reaches too."""
    name = visible(sample["id"])
    label = f" \N{EM DASH} label: <b>{visible(sample['label'])}</b>" if "label" in sample else ""
    pieces = (
        f"<mark>{visible(text)}</mark>" if supervised else visible(text)
        for supervised, text in sample["pieces"]
    )
    return f"<h4>{name}{label}</h4>\n<pre {BOX}>{''.join(pieces)}</pre>"
