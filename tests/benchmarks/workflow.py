"""What the workflow adds to the work: planning many runs, starting jobs, and waiting between them.

    python tests/benchmarks/workflow.py                 # the DAG of 10, 100 and 1000 runs
    python tests/benchmarks/workflow.py --folder DIR    # also the default job, run in DIR at first

The second divides the wall time of the command that ran the default job by the time in which at
least one of its jobs computed. A training computes for the seconds that train.json says it trained.
Any other job computes from when its imports are done until its end; so the loading of a model or a
tokenizer counts, Python's start and the imports do not. Imports of processes that start one after
another add up; of those that start together the longest counts. Then a command is timed that finds
nothing to do.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = str(ROOT / "config/config.yaml")
USING = ("--configfile", DEFAULT, "--cores", "2", "--resources", "gpu=2", "--quiet")
WALL, STARTUP = "wall.json", "startup.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="*", type=int, default=[10, 100, 1000])
    parser.add_argument("--folder", type=Path, help="made and filled if it is not there")
    args = parser.parse_args()
    for count in args.runs:
        with tempfile.TemporaryDirectory() as place:
            config = Path(place, "config.yaml")
            config.write_text(yaml.safe_dump(sweep(count)))
            wall, cpu = snakemake(place, "-n", "--quiet", "--configfile", str(config))
            print(f"dry run of {count} runs: {wall:.1f} s, {cpu:.1f} s of CPU", flush=True)
    if args.folder:
        if not args.folder.exists():
            fill(args.folder)
        compare_wall(args.folder)
        wall, cpu = snakemake(args.folder, *USING)
        print(f"nothing to do: {wall:.1f} s, {cpu:.1f} s of CPU")


def fill(folder: Path) -> None:
    """Run the default job, and have each of its processes tell how it started."""
    folder.mkdir(parents=True)
    told = {"STARTUP_RECORD": str(folder.resolve() / STARTUP)}
    told["PYTHONPATH"] = str(Path(__file__).parent / "startup")
    wall, cpu = snakemake(folder, *USING, **told)
    (folder / WALL).write_text(json.dumps({"wall": wall, "cpu": cpu}))


def sweep(count: int) -> dict:
    """The default config, with `count` runs that differ in their learning rate."""
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    config["runs"] = {
        f"run{number}": {"method": "qlora", "optimizer": {"learning_rate": 1e-4 + number * 1e-8}}
        for number in range(count)
    }
    return config


def snakemake(folder: str | Path, *options: str, **variables: str) -> tuple[float, float]:
    """Wall and CPU seconds of one command. Its jobs call the `python` that runs this."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), *options]
    before, started = cpu_of_children(), time.monotonic()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path} | variables
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=env)
    return time.monotonic() - started, cpu_of_children() - before


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare_wall(folder: Path) -> None:
    """The ratio, and where each job's time went."""
    started, computed = startup(folder), []
    for log, (start, end) in sorted(jobs(folder).items(), key=lambda job: job[1]):
        begun = min(end, start + started[log])
        record = folder / "results/runs" / Path(log).stem / "train.json"
        if log.startswith("logs/train/"):
            begun = end - json.loads(record.read_text())["training_seconds"]
        computed.append((begun, end))
        print(
            f"{log}: {end - start:.1f} s, of which interpreters and imports {started[log]:.1f}, "
            f"computing {end - begun:.1f}"
        )
    wall, busy = json.loads((folder / WALL).read_text())["wall"], covered(computed)
    print(f"{len(computed)} jobs: {wall:.0f} s, in {busy:.0f} s of which one computed", end=": ")
    print(f"{wall / busy:.3f}")


def jobs(folder: Path) -> dict[str, tuple[float, float]]:
    """Start and end of each job, by its log: Snakemake keeps a record for each output."""
    found = {}
    for path in (folder / ".snakemake/metadata").rglob("*"):
        if path.is_file():
            record = json.loads(path.read_text())
            found[record["log"][0]] = (record["starttime"], record["endtime"])
    return found


def startup(folder: Path) -> dict[str, float]:
    """Seconds of start-up, by log."""
    longest: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in map(json.loads, (folder / STARTUP).read_text().splitlines()):
        log = os.path.relpath(line["log"], folder.resolve())
        seconds = line["interpreter"] + line["imports"]
        longest[log][line["script"]] = max(longest[log][line["script"]], seconds)
    return defaultdict(float, {log: sum(scripts.values()) for log, scripts in longest.items()})


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


if __name__ == "__main__":
    main()
