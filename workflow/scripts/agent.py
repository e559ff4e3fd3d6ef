"""`accelerate launch` on a node, for launch.py: it ends with it, and tells how its first rank died.

Takes the options of `accelerate launch`. Of a rank that was killed nothing else is left to tell:
accelerate prints a ChildFailedError, which names the agent's own trouble.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from finetune.imports import collect_rarely
from finetune.nodes import join
from finetune.outcome import STATE, claim
from finetune.processes import PARENT, block_stops, die_with_parent


def main() -> None:
    block_stops()  # srun starts it with no signal blocked
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())  # that of the ranks
    collect_rarely()
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    folder, options = Path(os.environ[STATE]), launch_command_parser().parse_args()
    if options.num_machines:  # of one node nothing is said
        join(options)
    try:
        launch_command(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        claim(folder, "died", rank=rank, exit_code=failure.exitcode)
        sys.exit(1)


if __name__ == "__main__":
    main()
