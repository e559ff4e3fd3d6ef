"""Run Snakemake, print what each job is started with, and let trainings fail at once.

`python spied_run.py RULE… -- ARGUMENTS`: a line of JSON for each job of these rules. Snakemake
prints no resources of rules that have a `message`.
"""

import json
import sys

from snakemake.cli import main
from snakemake.executors.local import Executor
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

split = sys.argv.index("--")
RULES, ARGUMENTS = sys.argv[1:split], sys.argv[split + 1 :]
run_job = Executor.run_job


def spy(self: Executor, job) -> None:
    if job.rule.name in RULES:
        found = {name: job.resources.get(name) for name in ("gpu", "mem_mb", "disk_mb", "runtime")}
        print("SPY", json.dumps({"rule": job.rule.name, "attempt": job.attempt, **found}))
    if job.rule.name == "train":
        self.report_job_error(SubmittedJobInfo(job=job))
    else:
        run_job(self, job)


Executor.run_job = spy
main(ARGUMENTS)
