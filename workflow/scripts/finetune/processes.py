"""The processes of a training job: launcher, agent (torchrun) and ranks. Who may end whom.

A stop signal must end no agent and no rank by itself: SLURM sends SIGTERM to every process of a
job and a terminal sends SIGINT to a whole group, which would kill ranks that save. So the launcher
blocks these signals before it starts the others, which inherit that, and waits for them itself;
in each rank a thread does.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable

STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
"""`kill` and SLURM at the end of a job; Ctrl-C; SLURM some time before the end, where asked."""
STACKS = signal.SIGUSR2
"""A rank answers it with the stack of each of its threads."""
PARENT = "FINETUNE_PARENT"
"""Environment variable: the process id of the parent, as the parent knows it."""
PR_SET_PDEATHSIG = 1


def block_stops() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, SIGKILL included: no orphan keeps a
    GPU. A process that nobody of this workflow started lives as it likes."""
    if PARENT not in os.environ:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):  # it ended before the line above
        os._exit(1)


def several_nodes() -> bool:
    """In a rank: whether torchrun has agents on several."""
    return os.environ.get("GROUP_WORLD_SIZE", "1") != "1"


def answer_signals(stop: Callable[[], None]) -> None:
    """In a rank, before libraries start threads: `stop` is called for each stop signal."""
    block_stops()
    faulthandler.register(STACKS, file=sys.stderr)
    threading.Thread(target=wait_for_signals, args=(stop,), daemon=True).start()


def wait_for_signals(stop: Callable[[], None]) -> None:
    while True:
        sender = signal.sigwaitinfo(STOPS).si_pid
        if sender == os.getppid():  # the agent: another rank has ended, and this one waits for it
            os._exit(1)
        stop()
