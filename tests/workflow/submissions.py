"""Print what would be submitted for each job: `python submissions.py <arguments of snakemake -n>`.

Snakemake's own dry-run with the profile; the line is that of the SLURM plugin.
"""

import json
import sys

from snakemake.cli import main
from snakemake.executors import dryrun
from snakemake_executor_plugin_slurm import get_submit_command, set_gres_string

shown = dryrun.Executor.run_job


def run_job(self, job):
    if not job.is_local and job.rule.name != "all":
        partition = f" -p {job.resources.slurm_partition}"
        names = {"run_uuid": "RUN", "slurm_logfile": "LOG", "comment_str": job.rule.name}
        place = {"account": "", "partition": partition, "workdir": "HERE"}
        line = get_submit_command(job, names | place, self.workflow.executor_settings)
        print("SUBMIT", json.dumps([job.rule.name, line + set_gres_string(job)]), flush=True)
    shown(self, job)


dryrun.Executor.run_job = run_job
main(sys.argv[1:])
