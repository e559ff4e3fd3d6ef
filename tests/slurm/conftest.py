"""One real cluster for all tests here, and the chain run on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from project import ROOT, make_project
from survival import HOOK

CLUSTER = Path(__file__).with_name("cluster.sh")
PROFILE = ROOT / "workflow" / "profiles" / "slurm"
CANNOT = 77
MINUTES = 60.0

WAIT = """
if step == 3 and "resumed" not in open(self.args.output_dir + "/history.json").read():
    told = [self.args.output_dir + "/stop", "go"]
    while not any(map(os.path.exists, told)) and not self.stopper.deadline.near():
        time.sleep(0.2)
"""
"""The first attempt stands at its third step until it is told to stop, its time is nearly over, or
the file `go` is there."""


def cluster_does(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CLUSTER, *command], capture_output=True, text=True, timeout=300)


def slurm(*command: str) -> str:
    """One of SLURM's own commands."""
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """SLURM with one node of two GPUs. Skips where it cannot run."""
    started = cluster_does("start")
    if started.returncode == CANNOT:
        pytest.skip(started.stderr.strip())
    assert started.returncode == 0, started.stderr
    yield
    cluster_does("stop")


class Work:
    """Snakemake with the SLURM profile in a project folder, in the background."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, folder / "snakemake.out"
        self.run = folder / "results/runs/tiny-qlora"

    def start(self, *args: str, fault: str = "") -> Work:
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile")]
        command += [*args, "--profile", str(PROFILE), "--configfile", "config.yaml"]
        command += ["--slurm-init-seconds-before-status-checks", "2"]
        env = dict(os.environ)
        if fault:
            hooks = self.folder / "hooks"
            hooks.mkdir()
            body = "".join(f"    {line}\n" for line in fault.strip().splitlines())
            code = HOOK.format(code=f"def fault(self, rank, step):\n{body}")
            (hooks / "sitecustomize.py").write_text(code)
            env["PYTHONPATH"] = str(hooks)
        with open(self.said, "w") as said:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=env, stdout=said, stderr=subprocess.STDOUT
            )
        return self

    def end(self, minutes: float = 6) -> tuple[int, str]:
        """Exit code and all that was said."""
        try:
            code = self.process.wait(timeout=minutes * MINUTES)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"not ended: {self.text()[-3000:]}") from None
        return code, self.text()

    def text(self) -> str:
        return self.said.read_text()

    def wait_until(self, what: Callable[[], object], minutes: float = 4) -> object:
        """The first true answer of `what`."""
        until = time.monotonic() + minutes * MINUTES
        while not (answer := what()):
            assert time.monotonic() < until, (slurm("squeue", "--states=all"), self.text()[-3000:])
            time.sleep(0.2)
        return answer

    def wait_for_step(self, step: int) -> str:
        """Until training has logged it. The number of its job."""
        lines = self.run / "checkpoints" / "metrics.jsonl"
        logged = lambda: lines.exists() and f'"step": {step}, "loss"' in lines.read_text()  # noqa: E731
        self.wait_until(lambda: logged() or self.process.poll() is not None)
        assert logged(), self.text()[-3000:]
        [job] = self.jobs("rule_train")
        return job["id"]

    def jobs(self, comment: str = "rule_", states: str = "RUNNING,COMPLETING") -> list[dict]:
        """Jobs in SLURM's queue that were submitted from here, in the order of submission."""
        names = ("id", "state", "comment", "folder")
        asked = ("--format", "%i|%T|%k|%Z", f"--states={states}", "--sort=i", "--noheader")
        rows = (line.split("|") for line in slurm("squeue", *asked).splitlines())
        found = [dict(zip(names, row, strict=True)) for row in rows]
        here = [job for job in found if job["folder"] == str(self.folder)]
        return [job for job in here if job["comment"].startswith(comment)]

    def record(self) -> dict:
        return json.loads((self.run / "train.json").read_text())

    def events(self) -> list[str]:
        return [event["event"] for event in self.record()["events"]]

    def history(self) -> list[dict]:
        return json.loads((self.run / "checkpoints" / "history.json").read_text())


@pytest.fixture(scope="session")
def chain(cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Work:
    """The whole chain on the cluster: QLoRA under DDP and ZeRO-3 in one workflow."""
    work = Work(make_project(tmp_path_factory.mktemp("chain"), tiny_model))
    code, said = work.start("--verbose").end(minutes=15)
    assert code == 0, said[-4000:]
    return work


@pytest.fixture
def retrained(chain: Work, tiny_model: Path, tmp_path: Path) -> Work:
    """A copy of it, in which one run has to be trained again: four steps, nothing else."""
    folder = Path(shutil.copytree(chain.folder, tmp_path / "project", symlinks=True))
    make_project(folder, tiny_model, runs={"tiny-qlora": {"seed": 5}})
    shutil.rmtree(folder / "results/runs/tiny-qlora/trained")
    return Work(folder)


TRAINED = "results/runs/tiny-qlora/train.json"
