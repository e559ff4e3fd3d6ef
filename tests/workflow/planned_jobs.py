"""Print the jobs of a workflow as JSON: `python planned_jobs.py SNAKEFILE CONFIG CORES`.

Snakemake prints no resources for rules that have a `message`, so this asks it directly. The two
underscored calls are what its own `execute_workflow` makes first.
"""

import json
import sys
from pathlib import Path

from snakemake.api import SnakemakeApi
from snakemake.settings.types import ConfigSettings, OutputSettings, Quietness, ResourceSettings

ASKED = ("gpu", "mem_mb", "runtime", "nodes", "gres", "mpi", "tasks", "tasks_per_gpu")

snakefile, config, cores = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
    loaded = api.workflow(
        resource_settings=ResourceSettings(cores=cores),
        config_settings=ConfigSettings(configfiles=[config]),
        snakefile=snakefile,
    )
    loaded.dag()
    workflow = loaded._workflow
    workflow._prepare_dag(forceall=True, ignore_incomplete=True, lock_warn_only=True)
    workflow._build_dag()
    jobs = [
        {
            "rule": job.rule.name,
            "run": job.wildcards_dict.get("run"),
            "wildcards": job.wildcards_dict,
            "threads": job.threads,
            "log": list(map(str, job.log)),
            "benchmark": str(job.benchmark),
            "conda": job.rule.conda_env,
            "resources": {k: v for k, v in job.resources.items() if k in ASKED},
        }
        for job in workflow.dag.jobs
    ]
print(json.dumps(jobs))
