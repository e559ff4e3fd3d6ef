"""Several nodes: one agent on each, started by srun, and how these find each other.

They meet at a store that the launcher holds (torchrun's c10d rendezvous), on a port that the
kernel picked, so no port is fixed and none can be taken in between. Where the launcher is, SLURM
tells each agent: the address to which srun has just been answered.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket

from finetune.cli import UserError, run_again
from finetune.processes import PARENT

HEAD = "SLURM_LAUNCH_NODE_IPADDR"
"""Environment variable of an srun task: the address of the node that srun runs on."""


def check_nodes(gpus: int, nodes: int) -> None:
    """Several nodes are SLURM's to give, with as many GPUs on each."""
    if nodes == 1:
        return
    if "SLURM_JOB_ID" not in os.environ or not shutil.which("srun"):
        raise UserError(
            f"this run wants {nodes} nodes, and this is no SLURM job. "
            f"{run_again('--profile workflow/profiles/slurm')}, which submits it. Or set "
            "`nodes: 1` to train on this machine alone."
        )
    if gpus % nodes:
        raise UserError(
            f"{gpus} GPUs cannot be spread evenly over {nodes} nodes. Is there a limit, "
            f"`--resources gpu={gpus}`? Leave it out, or set it to a multiple of {nodes}."
        )


class Nodes:
    """The nodes of a job. Each attempt gets a store of its own: an old one remembers who met."""

    def __init__(self, count: int, threads: int) -> None:
        self.count, self.threads = count, threads

    def srun(self) -> list[str]:
        """Starts an agent on each node, and ends all when one fails. Empty for one node.

        An agent fails when the launcher is gone: torchrun looks at the store ten times a second.
        """
        if self.count == 1:
            return []
        return [
            *("env", "-u", PARENT),  # an agent's parent there is SLURM's
            *("srun", f"--nodes={self.count}", f"--ntasks={self.count}", "--ntasks-per-node=1"),
            # without --cpus-per-task a step gets one CPU a node
            *(f"--cpus-per-task={self.threads}", "--kill-on-bad-exit=1"),
        ]

    def meeting(self) -> list[str]:
        """Options of `accelerate launch`; what only an agent knows, `join` adds."""
        if self.count == 1:
            return ["--main_process_port", "0"]  # a free one
        from torch.distributed import TCPStore

        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return [
            *("--num_machines", str(self.count), "--main_process_port", str(self.store.port)),
            *("--rdzv_backend", "c10d", "--rdzv_conf", "is_host=0"),
            # c10d numbers the nodes; accelerate would have a machine 0 look whether its port is
            # free, and it is the store's
            *("--machine_rank", "1"),
            *("--deepspeed_multinode_launcher", "standard"),
        ]


def join(options: argparse.Namespace) -> None:
    """In an agent on one of several nodes: where the launcher is, and where this node is."""
    options.main_process_ip = os.environ[HEAD]
    options.local_addr = own_address(options.main_process_ip, options.main_process_port)


def own_address(host: str, port: int) -> str:
    """This machine's address on the network on which it reaches another: it may have several."""
    family = socket.getaddrinfo(host, port)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # a datagram socket sends nothing for this
        return probe.getsockname()[0]
