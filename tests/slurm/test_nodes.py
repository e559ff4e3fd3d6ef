"""Two nodes on a real SLURM, through the profile as users have it, two processes on each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from finetune.config import merge
from project import ROOT
from survival import Job

CLUSTER = Path(__file__).with_name("cluster.sh")
STEPS = 12
# What a cluster of two nodes on this machine needs otherwise than the profile has it.
HERE = (
    *("--default-resources", "slurm_partition=cpu", "runtime=10", "mem_mb=1000"),
    *("--set-resources", "train:slurm_partition=gpu", "--set-threads", "train=2"),
    *("--retries", "0", "--latency-wait", "10"),
    *("--slurm-init-seconds-before-status-checks", "3"),
)


@pytest.fixture(scope="module")
def two_nodes():
    done = subprocess.run([CLUSTER, "start", "2"], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    yield
    subprocess.run([CLUSTER, "stop"], check=True)


class Project:
    """A finished project whose runs are to be trained again, on two nodes."""

    def __init__(self, finished: Path, folder: Path, run: str) -> None:
        self.folder, self.run = folder, folder / "results" / "runs" / run
        shutil.copytree(finished, folder, symlinks=True)
        shutil.rmtree(folder / "results" / "runs")
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config = merge(config, {"defaults": {"nodes": 2, "gpus": 2, "steps": STEPS}})
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "snakemake", f"results/runs/{self.run.name}/train.json"]
        command += ["--snakefile", str(ROOT / "Snakefile"), "--configfile", "config.yaml"]
        command += ["--profile", str(ROOT / "workflow" / "profiles" / "slurm"), *HERE]
        with open(self.folder / "out", "a") as out:
            return subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=out)

    def said(self) -> str:
        logs = [self.folder / "out", *self.folder.glob("logs/slurm/**/*.log")]
        return "\n".join(path.read_text()[-3000:] for path in logs)

    def wait_for_a_step(self, workflow: subprocess.Popen) -> None:
        lines = self.run / "checkpoints" / "metrics.jsonl"
        while not (lines.exists() and '"loss"' in lines.read_text()):
            assert workflow.poll() is None, self.said()
            time.sleep(0.1)


def job_of(rule: str) -> str:
    """The SLURM id of its job that runs."""
    [job] = [line.split()[0] for line in squeue("-t", "R", "-o", "%A %k") if f"rule_{rule}" in line]
    return job


def squeue(*options: str) -> list[str]:
    done = subprocess.run(["squeue", "-h", *options], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("run", ["tiny-qlora", "tiny-full"])
def test_two_nodes_train_stop_and_go_on(
    two_nodes, finished: Path, tmp_path: Path, run: str
) -> None:
    project = Project(finished, tmp_path / "project", run)
    workflow = project.start()
    project.wait_for_a_step(workflow)
    job = job_of("train")
    assert squeue("-j", job, "-o", "%N") == ["node[1-2]"]
    subprocess.run(["scancel", "--signal=TERM", job], check=True)
    assert workflow.wait(timeout=120) == 1
    assert not (project.run / "trained").exists()
    events = json.loads((project.run / "checkpoints" / "history.json").read_text())
    assert [event["event"] for event in events] == ["started", "stopped"], project.said()

    assert project.start().wait(timeout=300) == 0, project.said()
    record = json.loads((project.run / "train.json").read_text())
    assert [event["event"] for event in record["events"]] == ["started", "stopped", "resumed"]
    assert (record["world_size"], record["accumulation"], record["steps"]) == (4, 1, STEPS)

    alone = Job(finished, tmp_path / "alone", run, steps=STEPS)
    assert alone.finish(gpus=4, threads=4) == 0, alone.log.read_text()[-3000:]
    expected, found = (weights_in(path) for path in (tmp_path / "alone", project.run))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in (folder / "trained").glob("*.safetensors"):
        tensors |= load_file(path)
    assert tensors
    return tensors
