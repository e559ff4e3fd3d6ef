"""What a user reads when something is wrong: before any job runs, and when a job fails."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from finetune.files import read_json
from project import ROOT, make_project, snakemake

BAD = {
    "unknown key": (
        {"runs": {"tiny-qlora": {"learning_rate": 1}}},
        "runs.tiny-qlora.learning_rate: unknown key",
    ),
    "misspelt key": (
        {"runs": {"tiny-qlora": {"lora": {"rnak": 8}}}},
        "runs.tiny-qlora.lora.rnak: unknown key; did you mean 'rank'?",
    ),
    "refused pair": (
        {"runs": {"tiny-qlora": {"launch": "zero3"}}},
        "`qlora` under `zero3` is refused: 4-bit weights are not partitioned at load",
    ),
    "batch": (
        {"runs": {"tiny-full": {"gpus": 3}}},
        "batch.global 4 is not a multiple of batch.micro 1 x 3 GPUs = 3. Set batch.global to 3 or",
    ),
    "batch over nodes": (
        {"runs": {"tiny-full": {"gpus": 2, "nodes": 3}}},
        "batch.global 4 is not a multiple of batch.micro 1 x 6 GPUs = 6. Set batch.global to 6.",
    ),
    "model name": (
        {"runs": {"tiny-full": {"model": "tinny"}}},
        "runs.tiny-full.model: no model is called 'tinny'; did you mean 'tiny'?",
    ),
    "idle section": (
        {"runs": {"tiny-full": {"lora": {"rank": 8}}}},
        "runs.tiny-full.lora: `method: full` does not read it",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_config_stops_at_parse_time(name: str, tiny_model: Path, tmp_path: Path) -> None:
    changes, text = BAD[name]
    project = make_project(tmp_path, tiny_model, **changes)
    done = snakemake("-n", "--cores", "2", "--configfile", "config.yaml", cwd=project)
    assert done.returncode == 1
    assert text in done.stdout
    assert "config.yaml:" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("runs/tiny-qlroa/model", "no run is called 'tiny-qlroa' in the config; did you mean"),
        ("data/ohter/stats.json", "no dataset is called 'ohter' in the config"),
        ("models/tinny/model.json", "no model is called 'tinny' in the config; did you mean"),
    ],
)
def test_a_target_that_the_config_does_not_have_is_named(
    target: str, text: str, tiny_model: Path, tmp_path: Path
) -> None:
    project = make_project(tmp_path, tiny_model)
    done = snakemake("-n", f"results/{target}", "--configfile", "config.yaml", cwd=project)
    assert done.returncode == 1
    assert text in done.stdout


def test_several_nodes_without_slurm_are_refused_before_the_first_job(
    tiny_model: Path, tmp_path: Path
) -> None:
    project = make_project(tmp_path, tiny_model, runs={"tiny-full": {"nodes": 2}})
    done = snakemake("--cores", "2", "--configfile", "config.yaml", cwd=project)
    assert done.returncode == 1
    text = (
        "this run wants 2 nodes, and this is no SLURM job. Run your command again with `--profile"
    )
    assert text in done.stdout
    assert not (project / "results").exists()


UNNAMED = (
    "runs.tiny-full, runs.tiny-qlora: plan_run is a job without a GPU and cannot see which one "
    "training gets: it would fill the memory of a CPU node instead. Add `gpu_model: a100-80` (or "
    "another of config/README.md) or `gpu_memory_gb: 80` to these runs, or to `defaults`, in the "
    "config. To train on CPUs, start snakemake with DS_ACCELERATOR=cpu."
)
NEXT = "`squeue --me --noheader --format %i|%T|%k|%Z` failed: no cluster"


@pytest.mark.parametrize(
    ("accelerator", "given", "arguments", "text"),
    [
        ("", {}, (), UNNAMED),
        ("cuda", {"gpu_memory_gb": 40}, (), NEXT),
        ("", {"gpu_model": "l4"}, (), NEXT),
        ("cpu", {}, (), NEXT),
        ("", {}, ("plan_run:gpu=1", "train:slurm_partition=gpu"), NEXT),  # then it sees one
    ],
    ids=["not named", "memory", "model", "on CPUs", "planned on a GPU"],
)
def test_gpus_that_no_plan_can_see_have_to_be_named_before_the_first_job(
    accelerator: str,
    given: dict,
    arguments: tuple[str, ...],
    text: str,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    project = make_project(tmp_path, tiny_model, defaults=given)
    squeue = tmp_path / "squeue"  # what is asked next
    squeue.write_text("#!/bin/sh\necho no cluster >&2; exit 1\n")
    squeue.chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "DS_ACCELERATOR": accelerator}
    profile = ("--profile", str(ROOT / "workflow" / "profiles" / "slurm"))
    changed = ("--set-resources", *arguments) if arguments else ()
    done = snakemake(*profile, "--configfile", "config.yaml", *changed, cwd=project, **env)
    assert done.returncode == 1
    assert text in done.stdout
    assert not (project / "results").exists()


def test_wrong_file_stops_before_a_gpu_is_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    project = make_project(tmp_path, tiny_model)
    (project / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    done = snakemake("--cores", "2", "--configfile", "config.yaml", cwd=project)
    assert done.returncode == 1
    expected = "rows.jsonl has the columns: question, answer. Needed: `messages`, or `conv"
    assert f"ERROR prepare_data lights: {expected}" in done.stdout
    assert "columns: {prompt: question, completion: answer}" in done.stdout
    assert "Training" not in done.stdout


def test_too_many_rejects_are_kept_to_be_read(tiny_model: Path, tmp_path: Path) -> None:
    project = make_project(tmp_path, tiny_model)
    with open(project / "rows.jsonl", "a") as file:
        file.write('{"prompt": ""}\n')
    done = snakemake("--cores", "2", "--configfile", "config.yaml", cwd=project)
    assert done.returncode == 1
    text = "1 x prompt is empty (e.g. rows.jsonl:41). Mend them, or raise max_rejects"
    assert text in done.stdout
    [folder] = (project / "results/data").iterdir()
    line = '{"source": "rows.jsonl", "line": 41, "reason": "prompt is empty"}\n'
    assert (folder / "rejects.jsonl").read_text() == line


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A finished project to break."""
    return Path(shutil.copytree(finished, tmp_path / "project", symlinks=True))


def test_too_big_for_the_gpu_is_refused_by_the_plan(copied: Path, tiny_model: Path) -> None:
    make_project(copied, tiny_model, runs={"tiny-full": {"gpu_memory_gb": 0.5, "seed": 9}})
    done = snakemake("--cores", "2", "--configfile", "config.yaml", cwd=copied)
    assert done.returncode == 1
    text = "ERROR plan_run tiny-full: needs about 0.8 GB on each GPU, but each has 0.5"
    assert text in done.stdout
    assert "The largest part is context (0.8 GB). No single change fits." in done.stdout


def test_no_gpu_granted_is_an_error(copied: Path) -> None:
    done = snakemake(
        *("--cores", "2", "--resources", "gpu=0", "--configfile", "config.yaml"),
        *("--forcerun", "train", "--until", "train"),
        cwd=copied,
    )
    assert done.returncode == 1
    assert (
        "no GPU was granted. Run your command again with `--resources gpu=1`, or more."
        in done.stdout
    )


def test_fewer_gpus_granted_is_said_and_keeps_the_batch(copied: Path) -> None:
    """Snakemake caps `gpu` at what --resources gives, without a word of its own."""
    done = snakemake(
        *("--cores", "2", "--resources", "gpu=1", "--configfile", "config.yaml"),
        *("--forcerun", "train", "--until", "train"),
        cwd=copied,
    )
    assert done.returncode == 0, done.stdout
    text = "1 x 2 x 2 = 4 rows were planned; with 1 granted it is 1 x 4 x 1"
    assert text in done.stdout
    record = read_json(copied / "results/runs/tiny-full/train.json")
    split = (record["micro_batch"], record["accumulation"], record["world_size"])
    assert split == (1, 4, 1)
