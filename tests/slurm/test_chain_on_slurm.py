"""The chain on a real cluster: what each job asked for is what its rule declares."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conftest import PROFILE, Work, slurm
from project import ROOT

ROUNDED = 0.005 * 1024
"""Megabytes: scontrol gives gigabytes with two digits."""
PLANNED = ROOT / "tests" / "workflow" / "planned_jobs.py"


def declared(work: Work) -> dict[str, dict]:
    """What Snakemake says that each job asks for, by the comment of its SLURM job."""
    command = [sys.executable, str(PLANNED), str(ROOT / "Snakefile"), "config.yaml", "64"]
    done = subprocess.run(command, cwd=work.folder, capture_output=True, text=True, check=True)
    jobs = json.loads(done.stdout.splitlines()[-1])
    return {comment(job): job for job in jobs}


def comment(job: dict) -> str:
    wildcards = "_".join(job["wildcards"].values())
    return f"rule_{job['rule']}" + (f"_wildcards_{wildcards}" if wildcards else "")


def submitted(work: Work) -> dict[str, dict[str, str]]:
    """What SLURM recorded of each job, by its comment."""
    found = {}
    for job in work.jobs(states="all"):
        text = slurm("scontrol", "--oneliner", "show", "job", job["id"])
        found[job["comment"]] = dict(re.findall(r"(\w+)=(\S*)", text))
    return found


def megabytes(tres: str) -> float:
    """Memory in what scontrol says, `cpu=4,mem=62.50G,node=1`."""
    number, unit = re.search(r"mem=([\d.]+)([MG])", tres).groups()
    return float(number) * {"M": 1, "G": 1024}[unit]


def test_every_job_got_what_its_rule_declares(chain: Work) -> None:
    asked, got = declared(chain), submitted(chain)
    usual = yaml.safe_load((PROFILE / "profile.yaml").read_text())["default-resources"]
    local = {"rule_all", "rule_fetch_model_wildcards_tiny", "rule_prepare_data_wildcards_lights"}
    assert set(asked) - set(got) == local
    assert set(got) <= set(asked)
    for name, job in got.items():
        resources, gpus = asked[name]["resources"], asked[name]["resources"].get("gpu", 0)
        # of a training of a kind that never ran, the profile's
        minutes = resources.get("runtime", usual["runtime"])
        assert job["NumCPUs"] == str(asked[name]["threads"]), name
        assert megabytes(job["TRES"]) == pytest.approx(resources["mem_mb"], abs=ROUNDED), name
        assert job["TimeLimit"] == f"{minutes // 1440}-" * (minutes >= 1440) + (
            f"{minutes % 1440 // 60:02}:{minutes % 60:02}:00"
        )
        assert re.findall(r"gpu:(\d+)", job.get("TresPerJob", "")) == [str(gpus)] * (gpus > 0), name
        assert job["Partition"] == ("gpu" if gpus else "cpu"), name
        assert (job["JobState"], job["Requeue"], job["NumNodes"]) == ("COMPLETED", "1", "1"), name


def test_there_is_a_rank_for_each_gpu(chain: Work) -> None:
    for run in ("tiny-qlora", "tiny-full"):
        record = json.loads((chain.folder / f"results/runs/{run}/train.json").read_text())
        assert record["world_size"] == 2


def files(folder: Path) -> set[str]:
    """Results, and logs and benchmarks of rules."""
    found = (p for name in ("results", "logs", "benchmarks") for p in (folder / name).rglob("*"))
    names = {str(path.relative_to(folder)) for path in found}
    return {name for name in names if not name.startswith("logs/slurm")}


def test_the_files_are_those_of_a_local_run(chain: Work, finished: Path) -> None:
    assert files(chain.folder) == files(finished)


def test_nothing_is_written_beside_them(chain: Work) -> None:
    given = {"rows.jsonl", "config.yaml", "snakemake.out"}
    written = {path.name for path in chain.folder.iterdir()} - given
    assert written == {"results", "logs", "benchmarks", ".snakemake"}
    status = ["git", "status", "--porcelain", "--ignored=no", "--", "workflow", "config", "envs"]
    done = subprocess.run(status, cwd=ROOT, capture_output=True, text=True)
    assert "??" not in done.stdout


def test_a_second_call_has_nothing_to_do(chain: Work) -> None:
    code, said = Work(chain.folder).start().end()
    assert code == 0
    assert "Nothing to be done" in said
