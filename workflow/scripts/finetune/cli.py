"""What every rule script shares at its edge: settings in, one clear line out on failure."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from finetune.imports import collect_rarely

terminal: TextIO | None = None
"""Where `say` speaks, while a script runs."""
speaker = ""
"""What its lines begin with: the script, and whose part of the work it does."""


class UserError(ValueError):
    """Something the user can mend. Its text says what is wrong, where, and what to do."""


def run_script(main: Callable[[], None]) -> None:
    """Run `main`. A failure ends in one line on the terminal; the traceback goes to the log.

    Rules send stderr to their log file and leave stdout, the terminal, to `say`: what libraries
    print goes to the log too.
    """
    global terminal, speaker
    collect_rarely()
    speaker = script()
    terminal = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        main()
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        complain(describe(error))
        sys.exit(1)


def script() -> str:
    return Path(sys.argv[0]).stem


def speak_for(whose: str) -> None:
    """Name the run, data set or model in what is said from now on: several are made at once.
    Where a script is run by hand, in the folder of its outputs, there may be no name."""
    global speaker
    speaker = f"{script()} {whose}".strip()


def describe(error: Exception) -> str:
    """One line; the hub's errors span several."""
    text = str(error)
    if not isinstance(error, UserError):
        hint = "free some space and run again" if is_disk_full(error) else "see the log of this job"
        text = f"{type(error).__name__}: {text} ({hint})"
    return " ".join(text.split())


def is_disk_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ENOSPC


def run_again(options: str) -> str:
    """Advice to run Snakemake with more options. Only the user knows the whole command: without
    their --configfile it would start another job. Where the option is --forcerun, give it a file:
    the name of a rule does all runs again."""
    return f"Run your command again with `{options}`"


def read_settings(text: str) -> dict:
    """The config keys a stage uses: JSON text, as the rule passes it, or a JSON file."""
    return json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())


def say(text: str) -> None:
    """One line for the person at the terminal, and the same in the log: `speaker: text`."""
    show(f"{speaker}: {text}" if speaker else text)


def complain(text: str) -> None:
    """Why it ends here: `ERROR speaker: text`."""
    show(f"ERROR {speaker}: {text}")


def show(text: str) -> None:
    """The line as it is."""
    print(text, file=sys.stderr, flush=True)
    if terminal is not None:
        print(text, file=terminal, flush=True)
