"""Which code, packages and machine made a result."""

from __future__ import annotations

import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import psutil

PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "peft",
    "bitsandbytes",
    "accelerate",
    "deepspeed",
    "tokenizers",
)


def package_versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def code_commit() -> str | None:
    """Commit of this workflow, with `-dirty` when files differ from it; None outside git."""
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    command += ["--exclude=*"]  # a tag would stand in for the commit
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def process_seconds() -> float:
    """How long this process has run, its imports included."""
    return time.time() - psutil.Process().create_time()
