"""What befalls jobs on a cluster, for real. Every wait has an end."""

from __future__ import annotations

import signal

import psutil
import pytest

from conftest import TRAINED, WAIT, Work, cluster_does, slurm


def submit_urgent(work: Work, seconds: int = 5) -> str:
    """A job that takes all GPUs, and the place of those that may be pushed out."""
    command = ("sbatch", "--parsable", "-p", "urgent", "--gpus=2", "-D", str(work.folder))
    return slurm(*command, "--output=urgent.log", f"--wrap=sleep {seconds}").strip()


def test_before_its_time_limit_training_saves_and_the_next_job_goes_on(retrained: Work) -> None:
    """Two minutes: nothing is sent to the job, and SLURM has not to end it."""
    asked = ("train:runtime=2", "train:slurm_partition=gpu")
    work = retrained.start(TRAINED, "--set-resources", *asked, fault=WAIT)
    code, said = work.end()
    assert code == 0, said[-3000:]
    assert ": the job's time is nearly over: stopped after step 3" in said
    assert [job["state"] for job in work.jobs("rule_train", "all")] == ["FAILED", "COMPLETED"]
    assert work.events() == ["started", "stopped", "resumed"]
    assert work.record()["events"][1]["late"]


@pytest.mark.parametrize("partition", ["gpu", "scavenge"])
def test_preempted_training_saves_in_its_grace_and_goes_on(retrained: Work, partition: str) -> None:
    """Those of `gpu` are queued again by SLURM, those of `scavenge` cancelled."""
    asked = ("--set-resources", f"train:slurm_partition={partition}")
    work = retrained.start(TRAINED, *asked, fault=WAIT)
    work.wait_for_step(2)
    submit_urgent(work)
    code, said = work.end()
    assert code == 0, said[-3000:]
    assert work.events() == ["started", "stopped", "resumed"]
    assert ": SIGTERM: finishing this step and saving" in said


def test_a_cancelled_job_ends_with_its_state_and_a_checkpoint(retrained: Work) -> None:
    work = retrained.start(TRAINED, "--retries", "0", fault=WAIT)
    number = work.wait_for_step(2)
    slurm("scancel", number)
    code, said = work.end(minutes=3)
    assert code == 1
    assert f"SLURM-job '{number}' failed, SLURM status is: 'CANCELLED'" in said
    assert "Error in rule train" in said
    assert work.history()[-1]["event"] == "stopped"
    assert not (work.run / "train.json").exists()


def test_a_node_that_dies_costs_what_came_after_the_checkpoint(retrained: Work) -> None:
    work = retrained.start(TRAINED, fault=WAIT)
    number = work.wait_for_step(2)
    crash_node(number)
    state = lambda: slurm("squeue", "-h", "-o", "%T", "-j", number).strip()  # noqa: E731
    work.wait_until(lambda: state() == "PENDING")
    assert cluster_does("start").returncode == 0
    code, said = work.end()
    assert code == 0, said[-3000:]
    assert [job["id"] for job in work.jobs("rule_train", "all")] == [number]  # SLURM's own doing
    assert work.events() == ["started", "killed", "resumed"]


def crash_node(number: str) -> None:
    """slurmd and every process of the job, without a word to anyone."""
    processes = list(psutil.process_iter(["cmdline"]))
    lines = {p: " ".join(p.info["cmdline"] or []) for p in processes}
    steps = [p for p, line in lines.items() if line.startswith(f"slurmstepd: [{number}.")]
    daemons = [p for p, line in lines.items() if line.startswith("slurmd -N")]
    assert steps
    assert daemons
    for process in daemons + [c for p in steps for c in [p, *p.children(recursive=True)]]:
        process.kill()


def test_a_killed_snakemake_finds_its_jobs_again(retrained: Work) -> None:
    work = retrained.start(TRAINED, fault=WAIT)
    number = work.wait_for_step(2)
    work.process.send_signal(signal.SIGKILL)
    code, said = work.start(TRAINED).end(minutes=2)
    assert code == 1
    assert "--unlock" in said
    assert work.start("--unlock").end(minutes=2)[0] == 0

    code, said = work.start(TRAINED).end(minutes=2)  # it still runs
    assert code == 1
    expected = f"have not ended: {number} (rule_train_wildcards_tiny-qlora, RUNNING). Wait for"
    assert expected in " ".join(said.split())

    (work.folder / "go").touch()
    work.wait_until(lambda: not work.jobs("rule_train"))
    code, said = work.start(TRAINED).end(minutes=2)  # it has finished, and Snakemake noted nothing
    assert code == 1
    assert "tiny-qlora is trained with the settings of the config" in said
    outputs = [
        f"results/runs/tiny-qlora/{name}" for name in ("trained", "metrics.jsonl", "train.json")
    ]
    assert "again with `--cleanup-metadata " + " ".join(outputs) in " ".join(said.split())
    assert work.start("--cleanup-metadata", *outputs).end(minutes=2)[0] == 0
    code, said = work.start(TRAINED).end(minutes=2)
    assert code == 0, said[-3000:]
    assert [job["id"] for job in work.jobs("rule_train", "all")] == [number]
    assert work.events() == ["started"]


IMPOSSIBLE = {
    "partition": (
        "slurm_partition=gpux",
        "rule train asks for the partition 'gpux', and this cluster has cpu, gpu, scavenge,",
    ),
    "time": (
        "runtime=2880",
        "rule train asks for a runtime of 2880 minutes, and the partition gpu allows 1440:",
    ),
    "memory": ("mem_mb=900000", "Requested node configuration is not available"),
    "GPUs": ("gpu=3", "Requested node configuration is not available"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_impossible_request_is_told_at_once_with_rule_and_resource(
    retrained: Work, what: str
) -> None:
    asked, text = IMPOSSIBLE[what]
    gpu = () if what == "partition" else ("train:slurm_partition=gpu",)
    work = retrained.start(TRAINED, "--set-resources", f"train:{asked}", *gpu)
    code, said = work.end(minutes=2)
    assert code == 1
    assert text in " ".join(said.split())
    if "not available" in text:
        assert "rule train:" in said
        flag = {"memory": "--mem 900000", "GPUs": "--gpus=3"}[what]
        assert flag in said


def test_a_question_that_nobody_answers_is_refused(retrained: Work) -> None:
    """sacct without an accounting daemon: Snakemake would wait for ever."""
    work = retrained.start(TRAINED, "--slurm-status-command", "sacct")
    code, said = work.end(minutes=2)
    assert code == 1
    assert "In the profile: `slurm-status-command: squeue`" in said
