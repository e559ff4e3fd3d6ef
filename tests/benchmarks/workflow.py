"""What the workflow adds to the work: planning many runs, and waiting between jobs.

    python tests/benchmarks/workflow.py                 # the DAG of 10, 100 and 1000 runs
    python tests/benchmarks/workflow.py --folder DIR    # also: DIR, in which the default job ran

The second compares the wall time of the jobs, first start to last end, with the time in which at
least one of them ran (from Snakemake's records), and times a command that finds nothing to do.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="*", type=int, default=[10, 100, 1000])
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    for count in args.runs:
        with tempfile.TemporaryDirectory() as place:
            config = Path(place, "config.yaml")
            config.write_text(yaml.safe_dump(sweep(count)))
            wall, cpu = snakemake(place, "-n", "--quiet", "--configfile", str(config))
            print(f"dry run of {count} runs: {wall:.1f} s, {cpu:.1f} s of CPU", flush=True)
    if args.folder:
        compare_wall(args.folder)
        wall, cpu = snakemake(args.folder, "--cores", "2", "--resources", "gpu=2", "--quiet")
        print(f"nothing to do: {wall:.1f} s, {cpu:.1f} s of CPU")


def sweep(count: int) -> dict:
    """The default config, with `count` runs that differ in their learning rate."""
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    config["runs"] = {
        f"run{number}": {"method": "qlora", "optimizer": {"learning_rate": 1e-4 + number * 1e-8}}
        for number in range(count)
    }
    return config


def snakemake(folder: str | Path, *options: str) -> tuple[float, float]:
    """Wall and CPU seconds of one command."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), *options]
    before, started = cpu_of_children(), time.monotonic()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started, cpu_of_children() - before


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare_wall(folder: Path) -> None:
    """Snakemake keeps a record of each output: when its job started and ended."""
    jobs = set()
    for record in (folder / ".snakemake/metadata").rglob("*"):
        if record.is_file():
            known = json.loads(record.read_text())
            jobs.add((known["starttime"], known["endtime"]))
    busy, until = 0.0, 0.0
    for start, end in sorted(jobs):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    wall = max(end for _, end in jobs) - min(start for start, _ in jobs)
    print(f"{len(jobs)} jobs: {wall:.0f} s, in {busy:.0f} s of which one ran: {wall / busy:.3f}")


if __name__ == "__main__":
    main()
