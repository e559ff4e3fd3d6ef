"""Become another program that is killed when its parent ends: python tied.py PROGRAM …

For srun, which nothing would end with launch.py. When it is killed, SLURM kills what it started
on all nodes.
"""

from __future__ import annotations

import os
import sys

from finetune.processes import PARENT, die_with_parent


def main() -> None:
    die_with_parent()
    os.environ.pop(PARENT, None)  # what srun starts has parents on other nodes
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
