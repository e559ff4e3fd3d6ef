"""Print what would be submitted for each job: `python submissions.py <arguments of snakemake -n>`.

Snakemake's own dry-run with the profile; the line is that of the SLURM plugin.
"""

import json
import sys
from pathlib import Path

import yaml
from snakemake.cli import main
from snakemake.executors import dryrun
from snakemake_executor_plugin_slurm import ExecutorSettings, get_submit_command, set_gres_string

PROFILE = Path(__file__).parents[2] / "workflow" / "profiles" / "slurm" / "profile.yaml"
SETTINGS = ExecutorSettings(requeue=yaml.safe_load(PROFILE.read_text())["slurm-requeue"])
shown = dryrun.Executor.run_job


def run_job(self, job):
    if job.rule.name not in self.workflow._localrules | {"all"}:
        partition = f" -p {job.resources.slurm_partition}"
        names = {"run_uuid": "RUN", "slurm_logfile": "LOG", "comment_str": job.rule.name}
        place = {"account": "", "partition": partition, "workdir": "HERE"}
        line = get_submit_command(job, names | place, SETTINGS) + set_gres_string(job)
        asked = {name: job.resources[name] for name in ("mem_mb", "runtime")}
        print("SUBMIT", json.dumps([job.rule.name, line, asked]), flush=True)
    shown(self, job)


dryrun.Executor.run_job = run_job
main(sys.argv[1:])
