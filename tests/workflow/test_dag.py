"""What Snakemake would do: exact job counts and resources, without running a job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from snakemake_executor_plugin_slurm.submit_string import get_submit_command
from snakemake_executor_plugin_slurm.utils import set_gres_string

from finetune.files import write_json
from project import ROOT, job_counts, make_project, snakemake

EXAMPLES = ROOT / "config" / "examples"
DEFAULT = {"make_intents": 1, "train": 2, "plan_run": 2, "merge": 2, "evaluate_run": 2}
ONE_RUN = dict.fromkeys(("train", "plan_run", "merge", "evaluate_run"), 1)
SWEEP = dict.fromkeys(("train", "plan_run", "merge", "evaluate_run"), 5)
RUNS = ("tiny-qlora", "tiny-full")
SHARED = (
    *("fetch_model", "prepare_data", "tokenize_data", "check_data", "evaluate_baseline"),
    *("compare", "all"),
)


def dry_run(*args: str, cwd: Path) -> str:
    done = snakemake("-n", "--cores", "all", *args, cwd=cwd)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("config", "runs"),
    [
        ("config/config.yaml", DEFAULT),
        ("config/examples/classification.yaml", DEFAULT),
        ("config/examples/own-data.yaml", ONE_RUN),
        ("config/examples/mixed-data.yaml", ONE_RUN),
        ("config/examples/qlora-7b-2gpus.yaml", ONE_RUN),
        ("config/examples/full-8b-zero3-8gpus.yaml", ONE_RUN),
        ("config/examples/full-8b-2nodes.yaml", ONE_RUN),
        ("config/examples/sweep.yaml", SWEEP),
    ],
)
def test_job_counts(config: str, runs: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "data" / "chats").mkdir(parents=True)
    for name in ("mine.jsonl", "our-test.csv", "chats/a.jsonl.gz"):
        (tmp_path / "data" / name).touch()
    output = dry_run("--configfile", str(ROOT / config), cwd=tmp_path)
    assert job_counts(output) == runs | dict.fromkeys(SHARED, 1)


def test_every_example_is_counted() -> None:
    tested = Path(__file__).read_text()
    assert [p.name for p in EXAMPLES.glob("*.yaml") if f"examples/{p.name}" not in tested] == []


def test_a_config_file_replaces_the_default(tmp_path: Path, tiny_model: Path) -> None:
    """Snakemake merges `--configfile` into the default one: the default's runs would train too."""
    project = make_project(tmp_path, tiny_model)
    (project / "config").mkdir()
    (project / "config" / "config.yaml").write_text((ROOT / "config/config.yaml").read_text())
    output = dry_run("--configfile", "config.yaml", cwd=project)
    assert "intents" not in output
    assert job_counts(output)["train"] == 2


def planned_jobs(cwd: Path, config: Path, cores: int = 16) -> list[dict]:
    script = Path(__file__).with_name("planned_jobs.py")
    command = [sys.executable, str(script), str(ROOT / "Snakefile"), str(config), str(cores)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("jobs")
    return planned_jobs(folder, ROOT / "config" / "config.yaml")


@pytest.mark.parametrize(
    ("rule", "gpu", "threads"),
    [
        ("make_intents", None, 1),
        ("fetch_model", None, 1),
        ("prepare_data", None, 8),
        ("tokenize_data", None, 8),
        ("check_data", None, 1),
        ("plan_run", None, 1),
        ("train", 2, 8),
        ("merge", 0, 4),
        ("evaluate_run", 1, 4),
        ("evaluate_baseline", 1, 4),
        ("compare", None, 1),
    ],
)
def test_each_rule_declares_what_it_takes(
    jobs: list[dict], rule: str, gpu: int | None, threads: int
) -> None:
    (job, *_) = [job for job in jobs if job["rule"] == rule]
    assert (job["resources"].get("gpu"), job["threads"]) == (gpu, threads)
    planned = ("train", "merge", "evaluate_run", "evaluate_baseline")
    mem_mb, runtime = (job["resources"][name] for name in ("mem_mb", "runtime"))
    assert mem_mb == "<TBD>" if rule in planned else mem_mb >= 1000
    assert runtime == "<TBD>" if rule in ("train", "merge") else runtime >= 10
    assert job["log"][0].startswith("logs/")
    assert job["benchmark"].startswith("benchmarks/")
    assert job["conda"].endswith("finetune.yaml")


def test_gpus_of_a_run_become_its_resource(tiny_model: Path, tmp_path: Path) -> None:
    runs = {"tiny-qlora": {"gpus": 4}, "tiny-full": {"gpus": 1}}
    project = make_project(tmp_path, tiny_model, runs=runs)
    jobs = planned_jobs(project, project / "config.yaml")
    asked = {j["run"]: j["resources"] for j in jobs if j["rule"] == "train"}
    assert {run: r["gpu"] for run, r in asked.items()} == {"tiny-qlora": 4, "tiny-full": 1}


def test_gpus_of_the_evaluation_become_its_resource_on_one_node(
    tiny_model: Path, tmp_path: Path
) -> None:
    project = make_project(tmp_path, tiny_model, datasets={"lights": {"evaluation": {"gpus": 2}}})
    jobs = planned_jobs(project, project / "config.yaml")
    evaluations = [job for job in jobs if job["rule"].startswith("evaluate")]
    assert len(evaluations) == 3
    for job in evaluations:
        assert (job["resources"]["gpu"], job["resources"]["nodes"]) == (2, 1)
        assert sbatch(job) == ["--nodes=1", "--cpus-per-task=4", "--gpus=2"]


def test_only_a_run_of_several_nodes_asks_for_nodes(tiny_model: Path, tmp_path: Path) -> None:
    """What SLURM gives by node is said by node: GPUs (`gres`), memory and CPUs. `gpu` is all."""
    runs = {"tiny-full": {"gpus": 2, "nodes": 2}}
    project = make_project(tmp_path, tiny_model, runs=runs)
    jobs = planned_jobs(project, project / "config.yaml")
    one, two = ({j["run"]: j for j in jobs if j["rule"] == "train"}[run] for run in RUNS)
    told_by_the_plan = dict.fromkeys(("mem_mb", "runtime"), "<TBD>")
    assert one["resources"] == {"gpu": 2, "nodes": 1} | told_by_the_plan
    asked = {"nodes": 2, "gres": "gpu:2", "mpi": "srun", "tasks": 2, "tasks_per_gpu": 0}
    assert two["resources"] == one["resources"] | {"gpu": 4} | asked
    assert one["threads"] == two["threads"] == 8
    assert sbatch(one) == ["--nodes=1", "--cpus-per-task=8", "--gpus=2"]
    nodes = ["--nodes=2", "--ntasks=2", "--cpus-per-task=8", "--gres=gpu:2", "--gpus=4"]
    assert sbatch(two) == nodes


def sbatch(job: dict) -> list[str]:
    """What the SLURM plugin makes of the resources: nodes, tasks, CPUs and GPUs."""
    params = ("run_uuid", "slurm_logfile", "comment_str", "account", "partition", "workdir")
    asked = Asked(resources=Asked(job["resources"]), threads=job["threads"])
    call = get_submit_command(asked, dict.fromkeys(params, "")) + set_gres_string(asked)
    kinds = ("--nodes", "--ntasks", "--cpus", "--gres", "--gpus")
    return [word for word in call.split() if word.startswith(kinds)]


class Asked(dict):
    """Keys as attributes too, as Snakemake has them."""

    __getattr__ = dict.get


SUBMITTED = {
    "make_intents": "cpu -t {runtime} --mem {mem_mb} --requeue --ntasks=1 --cpus-per-task=1",
    "tokenize_data": "cpu -t {runtime} --mem {mem_mb} --requeue --ntasks=1 --cpus-per-task=8",
    "check_data": "cpu -t {runtime} --mem {mem_mb} --requeue --ntasks=1 --cpus-per-task=1",
    "plan_run": "cpu -t {runtime} --mem {mem_mb} --requeue --ntasks=1 --cpus-per-task=1",
    "train": "gpu -t {runtime} --mem {mem_mb} --nodes=1 --requeue --cpus-per-task=8",
    "merge": "cpu -t {runtime} --mem {mem_mb} --requeue --ntasks=1 --cpus-per-task=4",
    "evaluate_run": "gpu -t {runtime} --mem {mem_mb} --nodes=1 --requeue --cpus-per-task=4",
    "evaluate_baseline": "gpu -t {runtime} --mem {mem_mb} --nodes=1 --requeue --cpus-per-task=4",
    "compare": "cpu -t {runtime} --mem {mem_mb} --requeue --ntasks=1 --cpus-per-task=1",
}
"""sbatch's options by rule. All others run on the submitting host."""
GPUS = {"train": " --gpus=2", "evaluate_run": " --gpus=1", "evaluate_baseline": " --gpus=1"}


def write_plans(folder: Path) -> None:
    """What tells jobs their resources, and is not there before the first of them has run."""
    host = {"train": 10e9, "merge": 5e9}
    disk = {"train": 2e9, "merge": 1e9}
    for run in ("intents-qlora", "intents-full"):
        memory = {"host": host, "disk": disk, "calibration": {"process": None, "node": None}}
        plan = {"memory": memory | {"cpu": False}, "time": None}
        path = folder / "results" / "runs" / run / "plan.json"
        path.parent.mkdir(parents=True)
        write_json(path, plan)
    records = {
        "models/smollm2/model.json": {"parameters": 10**9, "shapes": None},
        "tokens/intents/smollm2/lint.json": {"labels": None, "test": {"longest": 99}},
    }
    for name, record in records.items():
        path = folder / "results" / name
        path.parent.mkdir(parents=True)
        write_json(path, record)


def test_what_the_slurm_profile_submits(tmp_path: Path) -> None:
    """One task that sees all GPUs of the job, and no GPU for the others. No sbatch is needed."""
    write_plans(tmp_path)
    script = Path(__file__).with_name("submissions.py")
    command = [sys.executable, str(script), "-n", "--cores", "64"]
    command += ["--snakefile", str(ROOT / "Snakefile")]
    command += ["--profile", str(ROOT / "workflow" / "profiles" / "slurm")]
    command += ["--configfile", str(ROOT / "config" / "config.yaml")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("SUBMIT")]
    seen = [json.loads(line.removeprefix("SUBMIT ")) for line in lines]
    assert {rule for rule, _, _ in seen} == set(SUBMITTED)
    for rule, line, asked in seen:
        begin = f"sbatch --parsable --job-name RUN --output LOG --export=ALL --comment {rule}   -p "
        assert line == begin + SUBMITTED[rule].format(**asked) + " -D HERE" + GPUS.get(rule, "")


@pytest.mark.parametrize("profile", ["local", "slurm"])
def test_profiles_dry_run(profile: str, tmp_path: Path) -> None:
    path = ROOT / "workflow" / "profiles" / profile
    output = dry_run(
        "--profile", str(path), "--configfile", str(ROOT / "config/config.yaml"), cwd=tmp_path
    )
    assert job_counts(output)["train"] == 2
