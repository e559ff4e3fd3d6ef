"""Runs through Snakemake that are stopped, killed and starved of memory at random."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from finetune.config import merge
from project import ROOT
from survival import HOOK

STEPS = 14
CHECKPOINT_MINUTES = 0.01
OUT_OF_MEMORY = """
def fault(self, rank, step):
    time.sleep(0.25)  # else the run ends before anything can happen to it
    import torch
    if os.environ.get("OOM") == f"{rank} {step}" and self.args.per_device_train_batch_size > 1:
        raise torch.OutOfMemoryError("CUDA out of memory")
"""
KINDS = ("SIGTERM", "SIGUSR1", "Ctrl-C", "rank killed", "agent killed", "launcher killed", "memory")


@dataclass
class Cost:
    fault: str
    run: str
    lost_steps: int
    """Logged, and not in the checkpoint that the run goes on from."""
    seconds: float
    """From the fault to the end of Snakemake, or to the next start of the ranks."""


class Chaos:
    """A project whose trainings start anew."""

    def __init__(self, finished: Path, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        shutil.copytree(finished, folder, symlinks=True)
        shutil.rmtree(folder / "results" / "runs")
        config = yaml.safe_load((folder / "config.yaml").read_text())
        run = {"steps": STEPS, "checkpoint_minutes": CHECKPOINT_MINUTES}
        config = merge(config, {"defaults": run | {"batch": {"global": 4, "micro": 2}}})
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "hooks").mkdir(exist_ok=True)
        (folder / "hooks" / "sitecustomize.py").write_text(HOOK.format(code=OUT_OF_MEMORY))

    def start(self, run: str, **env: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "snakemake", f"results/runs/{run}/train.json"]
        command += ["--snakefile", str(ROOT / "Snakefile"), "--configfile", "config.yaml"]
        command += ["--cores", "2", "--resources", "gpu=2"]
        with open(self.folder / f"{run}.out", "a") as out:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # as a terminal does: Ctrl-C goes to all of it
                env=os.environ | {"PYTHONPATH": str(self.folder / "hooks")} | env,
            )

    def state(self, run: str) -> Path:
        return self.folder / "results" / "runs" / run / "checkpoints"

    def last_step(self, run: str) -> int:
        path = self.state(run) / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(x)["step"] for x in lines if x.endswith("}")), default=0)

    def events(self, run: str) -> list[dict]:
        path = self.state(run) / "history.json"
        return json.loads(path.read_text()) if path.exists() else []

    def train(self, run: str, faults: list[str]) -> list[Cost]:
        """Until it is finished, with these faults on the way."""
        costs = [cost for fault in faults if (cost := self.disturb(run, fault))]
        assert self.start(run).wait(timeout=300) == 0, self.said(run)
        return costs

    def said(self, run: str) -> str:
        return (self.folder / f"{run}.out").read_text()[-3000:]

    def disturb(self, run: str, fault: str) -> Cost | None:
        """None if the run was quicker than the fault."""
        begun = len(self.events(run))
        target = min(self.last_step(run) + self.draw.randint(1, 4), STEPS - 2)
        env = {"OOM": f"{self.draw.randint(0, 1)} {target + 1}"} if fault == "memory" else {}
        workflow = self.start(run, **env)
        while len(self.events(run)) == begun or self.last_step(run) < target:
            if workflow.poll() is not None:
                assert workflow.returncode == 0, self.said(run)
                return None
            time.sleep(0.02)
        if fault == "memory":
            return self.backs_off(run, workflow)
        at, started = self.last_step(run), time.monotonic()
        strike(workflow, fault)
        assert workflow.wait(timeout=60) != 0, self.said(run)
        seconds = time.monotonic() - started
        kept = [int(p.parent.name.split("-")[1]) for p in self.state(run).glob("*/checkpoint.json")]
        return Cost(fault, run, max(0, at - max(kept, default=0)), seconds)

    def backs_off(self, run: str, workflow: subprocess.Popen) -> Cost | None:
        """The launcher starts again by itself; once it does, it is stopped."""
        started = time.monotonic()
        while workflow.poll() is None:
            found = [i for i, e in enumerate(self.events(run)) if e["event"] == "out of memory"]
            if found and len(self.events(run)) > found[-1] + 1:
                before, after = self.events(run)[found[-1]], self.events(run)[found[-1] + 1]
                seconds = time.monotonic() - started
                strike(workflow, "SIGTERM")
                workflow.wait(timeout=60)
                return Cost("memory", run, before["step"] - after["step"], seconds)
            time.sleep(0.02)
        return None


def strike(workflow: subprocess.Popen, fault: str) -> None:
    if fault == "Ctrl-C":
        os.killpg(workflow.pid, signal.SIGINT)
    elif fault == "rank killed":
        random.choice(find(workflow, "agent.py").children()).kill()
    elif fault == "agent killed":
        find(workflow, "agent.py").kill()
    elif fault == "launcher killed":
        find(workflow, "launch.py").kill()
    else:
        find(workflow, "launch.py").send_signal(getattr(signal, fault))


def find(workflow: subprocess.Popen, script: str) -> psutil.Process:
    processes = psutil.Process(workflow.pid).children(recursive=True)
    return next(p for p in processes if script in " ".join(p.cmdline()[:2]) and not is_shell(p))


def is_shell(process: psutil.Process) -> bool:
    return "bash" in process.name()


def table(costs: list[Cost]) -> str:
    lines = [f"{'fault':16} {'run':12} {'lost steps':>10} {'seconds':>8}"]
    lines += [f"{c.fault:16} {c.run:12} {c.lost_steps:10} {c.seconds:8.1f}" for c in costs]
    return "\n".join(lines)
