"""The validated configuration, and how rules look things up in it."""

import json
import os
import re
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

SCRIPTS = Path(workflow.basedir, "workflow", "scripts")
sys.path.insert(0, str(SCRIPTS))

from finetune import stages
from finetune.config_errors import ConfigError, load_config
from finetune.sources import is_local, local_inputs
from finetune.splits import SPLITS

# DeepSpeed is imported along with peft, and complains on the terminal when it has to look for a
# device. Only training uses it, and launch.py sets the device there.
shell.prefix("export DS_ACCELERATOR=cpu; ")

try:
    CONFIG = load_config(config, workflow.configfiles)
except ConfigError as error:
    raise WorkflowError(str(error)) from None


wildcard_constraints:
    run="|".join(map(re.escape, CONFIG.runs)),
    model="|".join(map(re.escape, CONFIG.models)),
    dataset="|".join(map(re.escape, CONFIG.datasets)),


def script(name):
    """A script as the shell sees it: relative, so that a moved folder re-runs nothing."""
    return os.path.relpath(SCRIPTS / f"{name}.py")


def model_of(wildcards):
    """The config section of a model, named directly or through a run."""
    run = CONFIG.runs.get(getattr(wildcards, "run", None))
    return CONFIG.models[run.model if run else wildcards.model]


def dataset_of(wildcards):
    run = CONFIG.runs.get(getattr(wildcards, "run", None))
    return CONFIG.datasets[run.dataset if run else wildcards.dataset]


def run_of(wildcards):
    return CONFIG.runs[wildcards.run]


def of_run(pattern):
    """An input function: the pattern with the run's model and dataset filled in."""
    return lambda wildcards: pattern.format(
        model=run_of(wildcards).model, dataset=run_of(wildcards).dataset
    )


def settings(stage, *sections):
    """A params function: the keys that `stage` uses, as JSON."""
    return lambda wildcards: json.dumps(
        stage(*(section(wildcards) for section in sections))
    )
