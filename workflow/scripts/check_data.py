"""Rule check_data: the data check as a page to read.

Reads `lint.json`. Writes `lint.html`, with the verdict of the dataset's checks. It never fails:
`plan_run` stops the runs of data that fails them, when this page is there to say why.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from finetune.checks import failed_checks, notices
from finetune.cli import read_settings, run_script, say, speak_for
from finetune.files import read_json, write_aside
from finetune.lint_page import lint_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", required=True, type=read_settings)
    parser.add_argument("--lint", required=True, type=Path, help="lint.json")
    parser.add_argument("--title", required=True)
    parser.add_argument("--output", required=True, type=Path, help="lint.html")
    args = parser.parse_args()

    speak_for(args.title)
    lint = read_json(args.lint)
    failed = failed_checks(lint, args.settings["checks"])
    with write_aside(args.output) as aside:
        aside.write_text(lint_page(args.title, lint, failed), encoding="utf-8")
    verdict = f"failed checks: {len(failed)}" if failed else "all checks passed"
    say(f"{verdict}; see {args.output}")
    for notice in notices(lint):
        say(notice)


if __name__ == "__main__":
    run_script(main)
