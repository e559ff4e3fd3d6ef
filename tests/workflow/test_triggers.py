"""What a change makes Snakemake do again, on a project whose chain has run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from finetune.config import merge
from project import ROOT, job_counts, snakemake

ONE_RUN_AGAIN = {"train": 1, "merge": 1, "evaluate_run": 1, "compare": 1, "all": 1}


def jobs_after(project: Path, **changes: object) -> dict[str, int]:
    """Jobs of a dry-run with a changed copy of the config."""
    config = merge(yaml.safe_load((project / "config.yaml").read_text()), changes)
    changed = project / "changed.yaml"
    changed.write_text(yaml.safe_dump(config))
    done = snakemake("-n", "--cores", "2", "--configfile", str(changed), cwd=project)
    assert done.returncode == 0, done.stdout
    return {} if "Nothing to be done" in done.stdout else job_counts(done.stdout)


def test_nothing_changed(finished: Path) -> None:
    assert jobs_after(finished) == {}


def test_a_newer_script_runs_nothing(finished: Path) -> None:
    for path in (ROOT / "workflow" / "scripts").rglob("*.py"):
        os.utime(path)
    assert jobs_after(finished) == {}


def test_learning_rate_retrains_that_run_alone(finished: Path) -> None:
    rate = {"optimizer": {"learning_rate": 3e-4}}
    jobs = jobs_after(finished, runs={"tiny-qlora": rate})
    assert jobs == ONE_RUN_AGAIN | {"plan_run": 1}


def test_to_force_what_a_run_has_trained_does_that_run_alone(finished: Path) -> None:
    """As errors advise it. The name of the rule would train all runs again."""
    given = ("-n", "--cores", "2", "--configfile", "config.yaml")
    done = snakemake(*given, "--forcerun", "results/runs/tiny-qlora/trained", cwd=finished)
    assert job_counts(done.stdout) == ONE_RUN_AGAIN


def test_seed_retrains_without_a_new_plan(finished: Path) -> None:
    assert jobs_after(finished, runs={"tiny-full": {"seed": 5}}) == ONE_RUN_AGAIN


def test_evaluation_key_never_retrains(finished: Path) -> None:
    datasets = {"lights": {"evaluation": {"max_new_tokens": 9}}}
    jobs = jobs_after(finished, datasets=datasets)
    assert jobs == {"evaluate_run": 2, "evaluate_baseline": 1, "compare": 1, "all": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": 1},
        {"gpus": 4},
        {"batch": {"global": 4, "micro": 2}},
        {"batch": {"global": 4, "micro": "auto"}},
        {"gradient_checkpointing": True},
        {"gpu_memory_gb": 24},
        {"gpu_model": "h100", "allow_oversubscription": True},
        {"checkpoint_minutes": 5, "timeout_minutes": 60},
    ],
    ids=[
        *("fewer gpus", "more gpus", "micro-batch", "micro-batch auto", "recomputing"),
        *("gpu memory", "gpu model", "when to save and give up"),
    ],
)
def test_where_and_how_it_is_split_never_retrains(finished: Path, change: dict) -> None:
    assert jobs_after(finished, runs={"tiny-full": change}) == {}


def test_gpus_of_the_evaluation_make_nothing_again(finished: Path) -> None:
    assert jobs_after(finished, datasets={"lights": {"evaluation": {"gpus": 2}}}) == {}


def test_a_change_of_gpus_hides_no_other_change(finished: Path) -> None:
    """Snakemake looks at no other reason to run a job when one before it runs."""
    jobs = jobs_after(
        finished,
        runs={"tiny-full": {"gpus": 1}},
        datasets={"lights": {"evaluation": {"max_new_tokens": 9}}},
    )
    assert jobs == {"evaluate_run": 2, "evaluate_baseline": 1, "compare": 1, "all": 1}


def test_a_run_that_failed_is_planned_and_trained_again(finished: Path, tmp_path: Path) -> None:
    """Out of memory, so the user lowers the micro-batch: the plan has to be made again."""
    copied = Path(shutil.copytree(finished, tmp_path / "project", symlinks=True))
    folder = copied / "results" / "runs" / "tiny-full"
    shutil.rmtree(folder / "trained")
    for name in ("metrics.jsonl", "train.json"):
        (folder / name).unlink()
    jobs = jobs_after(copied, runs={"tiny-full": {"batch": {"micro": 2}}})
    assert jobs == ONE_RUN_AGAIN | {"plan_run": 1}


def test_merge_key_merges_again(finished: Path) -> None:
    jobs = jobs_after(finished, runs={"tiny-qlora": {"merge": {"base": "original"}}})
    assert jobs == {"merge": 1, "evaluate_run": 1, "compare": 1, "all": 1}


def test_a_default_retrains_only_the_methods_that_read_it(finished: Path) -> None:
    """There is one run with adapters."""
    jobs = jobs_after(finished, defaults={"lora": {"dropout": 0.2}})
    assert jobs == ONE_RUN_AGAIN | {"plan_run": 1}


def test_max_length_makes_tokens_again(finished: Path) -> None:
    jobs = jobs_after(finished, datasets={"lights": {"max_length": 150}})
    everything_after = {"tokenize_data": 1, "check_data": 1, "plan_run": 2, "train": 2, "merge": 2}
    assert jobs == everything_after | {
        "evaluate_run": 2,
        "evaluate_baseline": 1,
        "compare": 1,
        "all": 1,
    }


def test_data_content_and_not_its_time_counts(finished: Path) -> None:
    rows = finished / "rows.jsonl"
    before = rows.read_text()
    try:
        os.utime(rows)
        assert jobs_after(finished) == {}
        rows.write_text(before + json.dumps({"prompt": "new", "completion": "row"}) + "\n")
        assert jobs_after(finished)["prepare_data"] == 1
    finally:
        rows.write_text(before)


def test_a_new_run_shares_the_tokens(finished: Path) -> None:
    jobs = jobs_after(finished, runs={"third": {"method": "lora", "launch": "zero2"}})
    assert jobs == ONE_RUN_AGAIN | {"plan_run": 1}
