"""Become another program that gets SIGTERM when its parent ends: python tied.py PROGRAM …

For srun, which then kills what it started on all nodes. Killed itself, it would leave that alive.
"""

from __future__ import annotations

import os
import signal
import sys

from finetune.processes import PARENT, die_with_parent


def main() -> None:
    die_with_parent(signal.SIGTERM)
    os.environ.pop(PARENT, None)  # processes on other nodes have other parents
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
