"""What a SLURM cluster would answer late, in its own words or never, asked before the first job.

Snakemake calls `check_cluster` on the submitting host when it starts.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from math import inf

from finetune.cli import UserError, say
from finetune.config import Run

LONGEST_POLL = 180
"""Seconds between two looks of Snakemake's SLURM plugin at its jobs, at most."""


def ask(*command: str) -> str:
    """The answer of one of SLURM's commands."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except FileNotFoundError:
        raise UserError(
            f"there is no {command[0]} here: run Snakemake on a host of the cluster, or without "
            "`--profile workflow/profiles/slurm`"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"SLURM does not answer: `{' '.join(command)}` took a minute") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"`{' '.join(command)}` failed: {error.stderr.strip()}") from None
    return done.stdout


def check_cluster(
    folder: str, status_command: str, first_poll: int, jobs: Iterable[tuple[str, dict]]
) -> None:
    """Refuse what could only hang or be submitted in vain. `jobs`: rule and resources of each."""
    check_earlier_jobs(folder)
    check_accounting(status_command, first_poll)
    check_partitions({(rule, r.get("slurm_partition"), r.get("runtime")) for rule, r in jobs})


def check_gpus(planned: Mapping[str, Run]) -> None:
    """Runs, by name, whose plans are made in jobs that see no GPU: they take RAM for its memory,
    unless the config names it."""
    unnamed = [n for n, run in planned.items() if not (run.gpu_model or run.gpu_memory_gb)]
    if unnamed:
        raise UserError(
            f"{', '.join(f'runs.{name}' for name in sorted(unnamed))}: plan_run is a job without a "
            "GPU and cannot see which one training gets: it would fill the memory of a CPU node "
            "instead. Add `gpu_model: a100-80` (or another of config/README.md) or "
            "`gpu_memory_gb: 80` to these runs, or to `defaults`, in the config. To train on CPUs, "
            "start snakemake with DS_ACCELERATOR=cpu."
        )


def check_earlier_jobs(folder: str) -> None:
    """Of a Snakemake that was killed: they run on, and would be submitted a second time."""
    lines = ask("squeue", "--me", "--noheader", "--format", "%i|%T|%k|%Z").splitlines()
    jobs = [line.split("|", 3) for line in lines]
    ours = [(number, state, what) for number, state, what, where in jobs if where == folder]
    if ours := [job for job in ours if job[2].startswith("rule_")]:
        listed = ", ".join(f"{number} ({what}, {state})" for number, state, what in ours)
        numbers = " ".join(number for number, _, _ in ours)
        raise UserError(
            f"jobs that an earlier Snakemake submitted from here have not ended: {listed}. Wait "
            "for them and start this again: what they finish counts. Or end them: scancel "
            f"{numbers}"
        )


def check_accounting(status_command: str, first_poll: int) -> None:
    """How Snakemake learns that a job has ended. Asked the wrong way it waits for ever."""
    config = ask("scontrol", "show", "config")
    storage = re.search(r"^AccountingStorageType\s*=\s*(\S+)", config, re.M)
    if storage and storage[1] == "accounting_storage/slurmdbd":
        return
    if status_command == "sacct":
        raise UserError(
            "this cluster keeps no accounts of jobs, so that sacct never tells when one ends and "
            "Snakemake would wait for ever. In the profile: `slurm-status-command: squeue`"
        )
    kept = int(re.search(r"^MinJobAge\s*=\s*(\d+)", config, re.M)[1])
    if kept < 3 * first_poll:  # the plugin would turn to sacct by itself
        raise UserError(
            f"this cluster forgets ended jobs after {kept} s (MinJobAge) and keeps no accounts. In "
            f"the profile: `slurm-init-seconds-before-status-checks: {max(1, kept // 3)}`"
        )
    if kept <= LONGEST_POLL:
        say(
            f"slurm: ended jobs are forgotten after {kept} s (MinJobAge), and Snakemake looks "
            f"every {LONGEST_POLL} s at most: it may miss the end of one, and wait. Ask for "
            "MinJobAge=300"
        )


def check_partitions(asked: set[tuple[str, str | None, int | str | None]]) -> None:
    """Each is (rule, one partition or several with commas, minutes). A job over the limit of its
    partition may pend for ever. Minutes that a plan will tell are a string until there is one."""
    known, used = partitions(), set()
    for rule, names, minutes in sorted(asked, key=str):
        chosen = names.split(",") if names else []  # else SLURM has a partition for it
        for name in chosen:
            if name not in known:
                raise UserError(
                    f"rule {rule} asks for the partition {name!r}, and this cluster has "
                    f"{', '.join(known)}. Set `slurm_partition` in the profile"
                )
        limit = max((minutes_of(known[name]["MaxTime"]) for name in chosen), default=inf)
        if isinstance(minutes, int) and minutes > limit:
            raise UserError(
                f"rule {rule} asks for a runtime of {minutes} minutes, and the partition {names} "
                f"allows {limit}: the job would wait for ever. Set `runtime: {limit}` for {rule} "
                "under `set-resources` in the profile. Training that needs longer goes on in "
                "another job"
            )
        used.update(chosen)
    for name in sorted(used):
        if known[name].get("PreemptMode") == "CANCEL" and known[name].get("GraceTime") == "0":
            say(
                f"slurm: the partition {name} cancels jobs that others need the place of, without "
                "grace: Snakemake then waits. Ctrl-C, and start it again"
            )


def partitions() -> dict[str, dict[str, str]]:
    """What SLURM says of each partition, hidden ones too."""
    lines = ask("scontrol", "--all", "--oneliner", "show", "partition").splitlines()
    fields = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines if line]
    return {one["PartitionName"]: one for one in fields}


def minutes_of(text: str) -> float:
    """Whole minutes of `days-hours:minutes:seconds`; infinite for UNLIMITED."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)):
        return inf
    days, hours, minutes, _ = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + minutes
