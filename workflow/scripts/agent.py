"""`accelerate launch`, for launch.py: it dies with it, and tells how its first rank died.

Takes the options of `accelerate launch`. Of a rank that was killed nothing else is left to tell:
accelerate prints a ChildFailedError, which names the agent's own trouble.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from finetune.outcome import claim
from finetune.processes import PARENT, die_with_parent


def main() -> None:
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())  # that of the ranks
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    folder = Path(os.environ["FINETUNE_STATE"])
    try:
        launch_command(launch_command_parser().parse_args())
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        claim(folder, "died", rank=rank, exit_code=failure.exitcode)
        sys.exit(1)


if __name__ == "__main__":
    main()
