"""What every rule script shares at its edge: settings in, one clear line out on failure."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

NO_BYTES_LEFT = 28  # errno ENOSPC


class Refusal(ValueError):  # noqa: N818 - it is no fault of the program
    """Something the user can mend. Its text says what is wrong, where, and what to do."""


def run_script(main: Callable[[], None]) -> None:
    """Run `main`. A failure ends in one line on the terminal; the traceback goes to the log.

    Rules send stderr to their log file and leave stdout to the terminal.
    """
    name = Path(sys.argv[0]).stem
    try:
        main()
    except Refusal as error:
        fail(name, str(error))
    except Exception as error:
        traceback.print_exc()
        hint = "free some space and run again" if is_disk_full(error) else "see the log of this job"
        fail(name, f"{type(error).__name__}: {error} ({hint})")


def fail(name: str, text: str) -> None:
    print(f"{name}: {text}", file=sys.stderr, flush=True)
    print(f"ERROR {name}: {text}", flush=True)
    sys.exit(1)


def is_disk_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == NO_BYTES_LEFT


def settings(text: str) -> dict:
    """The config keys a stage uses: JSON text, as the rule passes it, or a JSON file."""
    return json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())


def say(text: str) -> None:
    """One line for the person at the terminal, and the same in the log."""
    print(text, file=sys.stderr, flush=True)
    print(text, flush=True)


def offline() -> bool:
    """Whether the user told the Hugging Face libraries to stay off the net."""
    return os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "ON", "YES", "TRUE"}
