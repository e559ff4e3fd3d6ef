"""The validated configuration, and how rules look things up in it."""

import json
import os
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

SCRIPTS = Path(workflow.basedir, "workflow", "scripts")
sys.path.insert(0, str(SCRIPTS))

from finetune import cluster, stages
from finetune.cli import UserError, run_again
from finetune.config_errors import ConfigError, load_config, nearest
from finetune.nodes import check_nodes
from finetune.sources import data_inputs, model_inputs
from finetune.splits import SPLITS

# Compute nodes mostly have no network: what a job there asked the hub would take minutes to fail.
OFFLINE = (
    " HF_HUB_OFFLINE=1"
    if "SLURM_JOB_ID" in os.environ and not workflow.is_main_process
    else ""
)
# What the user chose, and what a scheduler that names GPUs for a job must not change.
ON_CPU = " CUDA_VISIBLE_DEVICES=" if os.environ.get("DS_ACCELERATOR") == "cpu" else ""
# Where scripts are is no parameter of a rule: moving the repository must not train again.
# DeepSpeed is imported along with peft, and complains on the terminal when it has to look for a
# device. Only training uses it, and launch.py sets the device there.
shell.prefix(
    f"set -euo pipefail; export SCRIPTS={shlex.quote(str(SCRIPTS))} "
    f"DS_ACCELERATOR=cpu{ON_CPU}{OFFLINE}; "
)

try:
    CONFIG = load_config(config, workflow.configfiles)
except ConfigError as error:
    raise WorkflowError(str(error)) from None


# Before the first job: an executor's settings are known only now.
onstart:
    settings, jobs = workflow.executor_settings, list(workflow.dag.needrun_jobs())
    for job in jobs:
        if job.rule.name == "train":
            keep_trained(job, workflow.dag.reason(job))
    try:
        if type(settings).__module__ == "snakemake_executor_plugin_slurm":
            submitted = [job for job in jobs if not job.is_local]
            if not ON_CPU:
                cluster.check_gpus(planned_unseen(submitted))
            cluster.check_cluster(
                os.getcwd(),
                settings.status_command,
                settings.init_seconds_before_status_checks,
                [(job.rule.name, job.resources) for job in submitted],
            )
        else:
            for job in jobs:
                check_nodes(job.resources.get("gpu"), job.resources.get("nodes", 1))
    except UserError as error:
        raise WorkflowError(str(error)) from None


# Not a list of the names: Snakemake copies it into each path of each job.
wildcard_constraints:
    run="[^/]+",
    model="[^/]+",
    dataset="[^/]+",


def named(kind, sections, name):
    """The config section of that name, which somebody may have asked for on the command line."""
    if name not in sections:
        raise WorkflowError(
            f"no {kind} is called {name!r} in the config{nearest(name, sections)}"
        )
    return sections[name]


def model_of(wildcards):
    """The config section of a model, named directly or through a run."""
    asked = run_of(wildcards) if "run" in wildcards.keys() else wildcards
    return named("model", CONFIG.models, asked.model)


def dataset_of(wildcards):
    asked = run_of(wildcards) if "run" in wildcards.keys() else wildcards
    return named("dataset", CONFIG.datasets, asked.dataset)


def run_of(wildcards):
    return named("run", CONFIG.runs, wildcards.run)


def planned_unseen(jobs):
    """The runs, by name, that these jobs plan without a GPU of their own."""
    return {
        job.wildcards.run: run_of(job.wildcards)
        for job in jobs
        if job.rule.name == "plan_run" and not job.resources.get("gpu")
    }


def on_nodes(resource):
    """A resources function: what a run of several nodes asks for besides. None is not asked for."""
    return lambda wildcards: (
        resource(run_of(wildcards)) if run_of(wildcards).nodes > 1 else None
    )


def for_run(pattern):
    """An input function: the pattern with the run's model and dataset filled in."""
    return lambda wildcards: pattern.format(
        model=run_of(wildcards).model, dataset=run_of(wildcards).dataset
    )


def settings_of(stage, *sections):
    """A params function: the keys that `stage` uses, as JSON."""
    return lambda wildcards: json.dumps(
        stage(*(section(wildcards) for section in sections))
    )


def trained_as_configured(wildcards):
    """Whether a finished training used the very settings that the config holds now."""
    folder = Path("results", "runs", wildcards.run)
    if not Path(folder, "trained").is_dir() or not Path(folder, "train.json").exists():
        return False
    now = stages.train_settings(run_of(wildcards), model_of(wildcards))
    return json.loads(Path(folder, "train.json").read_text())["settings"] == now


def keep_trained(job, reason):
    """Refuse to train again for no reason but an old note of Snakemake's: a job that outlived the
    Snakemake that submitted it finishes its files, and nobody notes the settings."""
    known = (
        reason.updated_input
        or reason.updated_input_run
        or reason.missing_output
        or reason.forced
        or reason.input_changed
        or reason.code_changed
    )
    if reason.params_changed and not known and trained_as_configured(job.wildcards):
        as_it_is = run_again(f"--cleanup-metadata {' '.join(job.output)}")
        anew = run_again(f"--forcerun {job.output.trained}")
        raise WorkflowError(
            f"{job.wildcards.run} is trained with the settings of the config, by a job that outlived "
            f"its Snakemake. {as_it_is}, and then without, to take it as it is. {anew} to train anew."
        )


def plan_settings(wildcards):
    """Where a run is trained, and how its batch is split, is planned again only if it still has
    to be trained: a finished one keeps the plan that it was trained with."""
    sections = (section(wildcards) for section in (run_of, dataset_of, model_of))
    now = stages.plan_settings(*sections)
    plan = Path("results", "runs", wildcards.run, "plan.json")
    if plan.exists() and trained_as_configured(wildcards):
        then = json.loads(plan.read_text())["settings"]
        now |= {k: v for k, v in then.items() if k in stages.PLAN_ONLY}
    return json.dumps(now)


def plan_of(wildcards):
    """The plan, ancient to a finished run. Only then: when a plan is made again, Snakemake looks
    at no other reason to run what comes after an ancient one, a missing output included.
    """
    plan = f"results/runs/{wildcards.run}/plan.json"
    return ancient(plan) if trained_as_configured(wildcards) else plan
