"""Start train.py in one process per GPU, through `accelerate launch --config_file`.

Reads plan.json for the number of processes and nodes that was planned, and takes the number of
GPUs, over all nodes, that Snakemake granted.
Freezes the run's settings into train.yaml. Where there is no GPU the same command line starts
CPU processes. Ends with 0 when all steps are done, with 75 when it was stopped and can go on.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import yaml

from finetune import calibration
from finetune.attempts import STOPPED, Attempts
from finetune.backoff import micro_batch
from finetune.checkpoints import check_space
from finetune.cli import (
    UserError,
    describe,
    read_settings,
    run_again,
    run_script,
    say,
    speak_for,
)
from finetune.deadline import END_TIME, check_time, end_of_job
from finetune.facts import facts_of
from finetune.files import read_json, write_aside
from finetune.leases import LOCKS, lease, lock_path, lock_paths, try_lease, visible_devices
from finetune.nodes import Nodes, check_nodes
from finetune.processes import STOPS, block_stops
from finetune.refusals import check_installed

ROOT = Path(__file__).resolve().parents[2]
AGENT, TRAIN = (Path(__file__).with_name(name) for name in ("agent.py", "train.py"))
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""What flock says on shared file systems that are mounted without locks."""
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of PyTorch's caching allocator. On CUDA the older name wins, where both are there."""


def main() -> None:
    block_stops()
    args = parse()
    speak_for(args.output.parent.name)
    plan, state = read_json(args.plan), args.output.parent / "checkpoints"
    nodes = Nodes(plan["settings"]["nodes"], args.threads)
    check_nodes(args.gpus, nodes.count)
    state.mkdir(parents=True, exist_ok=True)
    check_installed(args.settings["attention"])
    with only_launch(args.output.parent) as lock:
        devices, here = visible_devices(), args.gpus // nodes.count
        check_devices(args.gpus, plan, len(devices) * nodes.count)
        micro = micro_batch(args.gpus, plan, state)
        check_space(state, plan["memory"]["disk"])
        check_time(end := end_of_job(), state)
        with write_aside(args.config) as aside:
            aside.write_text(yaml.safe_dump(args.settings, sort_keys=False))
        facts = facts_of(args.settings, plan, args.tokens, args.model, args.gpus)
        with leased(here, devices, nodes.count) as (ids, locks):
            env = environment(args.threads, here, ids)
            env |= {END_TIME: str(end)} if end else {}
            env[LOCKS] = os.pathsep.join(map(str, filter(None, [lock, *locks])))
            command = partial(agent_command, args, state, nodes)
            code = Attempts(state, plan, facts, micro, command, env).run()
        if code == 0:
            keep_for_later(args, plan)
    sys.exit(code)


def keep_for_later(args: argparse.Namespace, plan: dict) -> None:
    """What this run took, for the plans of others."""
    try:
        longest = read_json(args.tokens / "lint.json")["train"]["longest"]
        line = calibration.finished(read_json(args.record), plan, longest)
        calibration.append(args.calibration, line)
    except Exception as error:  # any: a job that fails now loses its finished model
        say(
            f"no later plan learns from this run, {args.calibration} could not be "
            f"written: {describe(error)}"
        )


@contextmanager
def only_launch(folder: Path) -> Iterator[Path | None]:
    """Refuse to train in a folder in which another launch, or a rank of it, still lives."""
    locks = folder / ".lock"
    with ExitStack() as held:
        try:
            alone = try_lease(1, ["launch"], locks, held)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            say(
                f"the file system of {folder} has no file locks ({error.strerror}): start "
                "this run once only"
            )
            yield None
            return
        if not alone:
            raise UserError(
                f"another launch of this run is alive: its processes hold {locks / 'launch'}. "
                f"Wait for it, or end it: fuser -k -TERM {locks / 'launch'}"
            )
        yield lock_path(locks, "launch")


@contextmanager
def leased(count: int, devices: list[str], nodes: int) -> Iterator[tuple[list[str], list[Path]]]:
    """The devices on this node, and the locks that hold them. On several nodes srun says which
    ones each agent gets, and no lock of this machine reaches the others."""
    if nodes > 1:
        yield devices[:count], []
        return
    with lease(count, devices, pause=pause) as ids:
        yield ids, lock_paths(ids)


def pause(seconds: float) -> None:
    """Wait for a device, but not after a stop."""
    if signal.sigtimedwait(STOPS, seconds):
        say("stopped before training began; the same command starts it")
        sys.exit(STOPPED)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", required=True, type=read_settings)
    parser.add_argument("--gpus", required=True, type=int, help="granted, one process per GPU")
    parser.add_argument("--threads", required=True, type=int, help="CPU threads on a node")
    parser.add_argument("--config", required=True, type=Path, help="where settings are frozen")
    for name in ("plan", "tokens", "model", "output", "metrics", "record", "calibration"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    return parser.parse_args()


def check_devices(granted: int, plan: dict, devices: int) -> None:
    """More processes than GPUs would share one."""
    if 0 < devices < granted:
        raise UserError(
            f"this run wants {granted} GPUs and {devices} are visible. "
            f"{run_again(f'--resources gpu={devices}')} (the batch stays "
            f"{plan['global_batch']} rows), or on the CPU with CUDA_VISIBLE_DEVICES=''."
        )


def agent_command(
    args: argparse.Namespace, state: Path, nodes: Nodes, micro: int, checkpoint: Path | None
) -> list[str]:
    command = nodes.srun() + accelerate_command(args.settings["launch"], args.gpus)
    command += nodes.meeting() + train_command(args)
    command += ["--state", str(state), "--micro-batch", str(micro)]
    command += ["--resume", str(checkpoint)] if checkpoint else []
    print("launch:", " ".join(command), file=sys.stderr, flush=True)
    return command


def accelerate_command(launch: str, processes: int) -> list[str]:
    """`accelerate launch`. `--config_file` keeps a user's default accelerate config out."""
    config = ROOT / "config" / "accelerate" / f"{launch}.yaml"
    command = [sys.executable, str(AGENT), "--config_file", str(config)]
    command += ["--num_processes", str(processes)]
    deepspeed = yaml.safe_load(config.read_text()).get("deepspeed_config")
    if deepspeed:  # the file names it relative to the repository; jobs may run elsewhere
        command += ["--deepspeed_config_file", str(ROOT / deepspeed["deepspeed_config_file"])]
    return command


def train_command(args: argparse.Namespace) -> list[str]:
    command = [str(TRAIN), "--world-size", str(args.gpus)]
    for name in ("config", "plan", "tokens", "model", "output", "metrics", "record"):
        command += [f"--{name}", str(getattr(args, name))]
    return command


def environment(threads: int, processes: int, devices: list[str]) -> dict[str, str]:
    """What every rank inherits. Training never asks the hub for anything."""
    share = str(max(1, threads // processes))
    ours = devices and not os.environ.keys() & set(ALLOCATOR)
    return os.environ | {
        # Snakemake sets all of these to the threads of the job. Left so, MKL alone starts that
        # many in every rank, and training on a CPU is ten times slower.
        **dict.fromkeys(THREAD_VARIABLES, share),
        # rows of ever other lengths would leave segments of fixed size in fragments
        **({ALLOCATOR[-1]: "expandable_segments:True"} if ours else {}),
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "DS_ACCELERATOR": "cuda" if devices else "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


if __name__ == "__main__":
    run_script(main)
