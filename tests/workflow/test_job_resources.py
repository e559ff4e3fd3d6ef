"""Memory, disk and time of jobs: from a plan made in the same call, and what they never do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from finetune.config import Evaluation
from finetune.files import read_json, write_json
from finetune.resources import disk_mb, evaluation_mb, mem_mb, train_minutes
from project import ROOT, make_project, snakemake

RUN = "results/runs/tiny-qlora"
HERE = Path(__file__).parent


def started(project: Path, *arguments: str, rules: tuple[str, ...] = ("train",)) -> list[dict]:
    """What these rules' jobs are started with. Trainings fail at once."""
    command = [sys.executable, str(HERE / "spied_run.py"), *rules, "--", f"{RUN}/train.json"]
    command += ["--snakefile", str(ROOT / "Snakefile"), "--configfile", "config.yaml"]
    command += ["--cores", "2", *arguments]
    done = subprocess.run(
        command, cwd=project, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SPY ")]
    assert lines, done.stdout
    return [json.loads(line.removeprefix("SPY ")) for line in lines]


@pytest.fixture
def unplanned(finished: Path, tmp_path: Path) -> Path:
    """A project with data and tokens, and no runs."""
    copied = Path(shutil.copytree(finished, tmp_path / "project", symlinks=True))
    shutil.rmtree(copied / "results" / "runs")
    return copied


def test_a_job_asks_for_what_the_plan_of_the_same_call_says(unplanned: Path) -> None:
    """And again for more, when it failed."""
    jobs = started(unplanned, "--resources", "gpu=2", "--retries", "1")
    plan = read_json(unplanned / RUN / "plan.json")
    assert [job["attempt"] for job in jobs] == [1, 2]
    assert [job["mem_mb"] for job in jobs] == [mem_mb(plan, "train", n) for n in (1, 2)]
    assert jobs[1]["mem_mb"] == pytest.approx(1.5 * jobs[0]["mem_mb"], abs=1)
    assert {job["disk_mb"] for job in jobs} == {disk_mb(plan, "train")}
    assert {job["gpu"] for job in jobs} == {2}


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "project", symlinks=True))


def test_time_is_the_profiles_until_a_run_of_the_kind_is_finished(copied: Path) -> None:
    """Both plans were made before a training had ended."""
    default = ("--forcerun", "train", "--default-resources", "runtime=77*attempt")
    assert [job["runtime"] for job in started(copied, *default)] == [77]
    plan = read_json(copied / RUN / "plan.json") | {"time": {"seconds": 3600}}
    write_json(copied / RUN / "plan.json", plan)
    assert [job["runtime"] for job in started(copied, *default)] == [train_minutes(plan)]


def test_what_a_profile_sets_wins(copied: Path) -> None:
    profile = {"set-resources": {"train": {"mem_mb": 12345, "runtime": 99, "disk_mb": 7}}}
    (copied / "profile").mkdir()
    (copied / "profile" / "profile.yaml").write_text(yaml.safe_dump(profile))
    [job] = started(copied, "--forcerun", "train", "--profile", "profile")
    assert [job[name] for name in ("mem_mb", "runtime", "disk_mb")] == [12345, 99, 7]


def evaluations(project: Path, tiny_model: Path, **keys: dict) -> list[int]:
    """mem_mb of the two runs' evaluations and of the baseline's."""
    make_project(project, tiny_model, **keys)
    command = [sys.executable, str(HERE / "planned_jobs.py"), str(ROOT / "Snakefile")]
    done = subprocess.run(
        [*command, "config.yaml", "2"], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    jobs = json.loads(done.stdout.splitlines()[-1])
    return [job["resources"]["mem_mb"] for job in jobs if job["rule"].startswith("evaluate_")]


@pytest.mark.parametrize("cpu", [True, False])
def test_models_tuned_and_not_ask_for_the_same_to_be_evaluated(
    copied: Path, tiny_model: Path, cpu: bool
) -> None:
    """By the evaluation's own keys, and by what the plans say of where."""
    [model] = (copied / "results" / "models").glob("*/model.json")
    [lint] = (copied / "results" / "tokens").glob("*/*/lint.json")
    for plan in (copied / "results" / "runs").glob("*/plan.json"):
        record = read_json(plan)
        write_json(plan, record | {"memory": record["memory"] | {"cpu": cpu}})
    chosen = {"batch_size": 500, "max_new_tokens": 200}
    found = evaluations(copied, tiny_model, datasets={"lights": {"evaluation": chosen}})
    asked = evaluation_mb(read_json(model), read_json(lint), Evaluation(**chosen), cpu, 1)
    assert found == 3 * [asked]
    if cpu:  # what a plan does not say yet
        plan.unlink()
        assert evaluations(copied, tiny_model, datasets={"lights": {"evaluation": chosen}}) == found
    told = {name: {"gpu_memory_gb": 24} for name in ("tiny-qlora", "tiny-full")}
    on_gpu = evaluation_mb(read_json(model), read_json(lint), Evaluation(), False, 1)
    assert evaluations(copied, tiny_model, runs=told) == 3 * [on_gpu]


def nothing_to_do(project: Path) -> bool:
    done = snakemake("-n", "--cores", "2", "--configfile", "config.yaml", cwd=project)
    assert done.returncode == 0, done.stdout
    return "Nothing to be done" in done.stdout


def test_neither_resources_nor_what_runs_taught_make_anything_again(copied: Path) -> None:
    calibration = copied / "results" / "calibration.jsonl"
    lines = calibration.read_text()
    assert len(lines.splitlines()) == 2  # one a run
    calibration.write_text(lines + lines.replace('"run":"tiny', '"run":"other') + "damaged\n")
    assert nothing_to_do(copied)
    calibration.unlink()
    assert nothing_to_do(copied)
    done = snakemake(
        *("-n", "--cores", "2", "--configfile", "config.yaml"),
        *("--set-resources", "train:mem_mb=1", "merge:runtime=1"),
        cwd=copied,
    )
    assert "Nothing to be done" in done.stdout


def test_a_plan_of_other_code_is_named(copied: Path) -> None:
    path = copied / "results/runs/tiny-full/plan.json"
    plan = json.loads(path.read_text())
    del plan["memory"]["host"]
    path.write_text(json.dumps(plan))
    done = snakemake("-n", "--cores", "1", "--configfile", "config.yaml", "--forceall", cwd=copied)
    assert done.returncode != 0
    assert "tiny-full/plan.json lacks 'host': other code wrote it. Remove it" in done.stdout
