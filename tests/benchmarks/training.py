"""How fast does it train, and in how much memory, against TRL's SFTTrainer?

    pip install --no-deps --target trl trl==1.16.0   # the rest of it is there
    python tests/benchmarks/training.py --trl trl --steps 20 --repeats 3

Both train the same model by the same launcher on the same rows, in the same global batches, with
the same seed and settings; in turn, since a machine that other work shares is never as fast twice.
Ours runs through launch.py. CPU seconds are those of all ranks: other work changes them little.
`--scaling` trains ours with one process as well, and with as many of those at once as the machine
is to bear: what they lose beside each other is the machine's, not the workflow's.
On GPUs `--tflops` (of one device, dense, in bf16: 989 for an H100 or H200) gives the share of them
that went into the model. It is that of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B):
6 N + 12 L H Q T operations a token, a third less where only adapters are trained, since the base
has no gradients of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "workflow" / "scripts"
RANKS = Path(__file__).with_name("ranks.py")
sys.path.insert(0, str(SCRIPTS))
from finetune.files import read_json  # noqa: E402

RUNS = {
    "qlora": {"method": "qlora", "batch": {"global": 16, "micro": 4}},
    "full": {"method": "full", "batch": {"global": 16, "micro": 8}},
}
LAUNCH = (
    "import pathlib, launch; launch.TRAIN = pathlib.Path({ranks!r}); launch.run_script(launch.main)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", type=Path, help="folder that holds it; without it ours runs alone")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--tflops", type=float)
    parser.add_argument("--folder", type=Path, help="kept, so that data is made ready once")
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp())).resolve()
    prepare(folder, args)
    for run in args.runs:
        measured = {"ours": [], "trl": [], "alone": [], "apart": []}
        for _ in range(args.repeats):
            measured["ours"].append(ours(folder, run, args.processes))
            if args.trl:
                measured["trl"].append(theirs(folder, run, args))
            if args.scaling:
                measured["alone"].append(ours(folder, run, 1))
                measured["apart"].append(apart(folder, run, args.processes))
        report(run, measured, args.processes)
        predicted = read_json(places(folder, run)["plan"])["memory"]["total"] / 1e9
        print(f"{run}: {predicted:.4g} GB predicted for a rank")
        if args.tflops:
            speed = statistics.median(one["tokens/s"] for one in measured["ours"])
            share = speed * operations(folder, run) / args.processes / args.tflops / 1e12
            print(f"{run}: MFU {share:.1%}")


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """The default config's model and data; plans of the runs."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config_of(args.steps, args.processes)))
    targets = [f"results/runs/{run}/plan.json" for run in RUNS]
    command = ["snakemake", "--snakefile", ROOT / "Snakefile", "--configfile", "config.yaml"]
    command += ["--cores", "all", "--quiet", "--", *targets]
    subprocess.run(command, cwd=folder, check=True)


def config_of(steps: int, processes: int) -> dict:
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    config["defaults"] |= {"steps": steps, "gpus": processes, "log_every": 1}
    config["defaults"]["validate_every"] = steps + 1
    return config | {"runs": RUNS}


def operations(folder: Path, run: str) -> float:
    """Floating-point operations a token, forward and backward."""
    from finetune.tokens import open_tokens

    shapes = read_json(places(folder, run)["model"].parent / "model.json")["shapes"]
    lengths = open_tokens(places(folder, run)["tokens"] / "train")["length"][:]
    attention = 12 * shapes["layers"] * shapes["hidden"] * statistics.mean(lengths)
    whole = 6 * shapes["parameters"] + attention
    return whole if RUNS[run]["method"] == "full" else whole * 2 / 3


def places(folder: Path, run: str) -> dict[str, Path]:
    results = folder / "results"
    return {
        "plan": results / "runs" / run / "plan.json",
        "tokens": results / "tokens/intents/smollm2",
        "model": results / "models/smollm2/pretrained",
    }


def apart(folder: Path, run: str, processes: int) -> dict:
    """So many runs at once that know nothing of each other, of one process each."""
    names = [f"apart{number}" for number in range(processes)]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda name: ours(folder, run, 1, name), names))
    return found[0] | {"tokens/s": sum(one["tokens/s"] for one in found)}


def ours(folder: Path, run: str, processes: int, name: str = "ours") -> dict:
    """Through launch.py, with one thread a process."""
    output = folder / name / run
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    command = [sys.executable, "-c", LAUNCH.format(ranks=str(RANKS))]
    command += launch_options(folder, run, processes, output)
    return timed(command, output, batches(folder, run)[1:])


def launch_options(folder: Path, run: str, processes: int, output: Path) -> list[str]:
    from finetune.config_errors import load_config
    from finetune.stages import train_settings

    path = folder / "config.yaml"
    config = load_config(yaml.safe_load(path.read_text()), [path])
    settings = train_settings(config.runs[run], config.models["smollm2"])
    options = places(folder, run) | {
        "settings": json.dumps(settings),
        "gpus": processes,
        "threads": processes,
        "output": output / "trained",
        "metrics": output / "metrics.jsonl",
        "record": output / "train.json",
        "config": output / "train.yaml",
        "calibration": output / "calibration.jsonl",
    }
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def theirs(folder: Path, run: str, args: argparse.Namespace) -> dict:
    """By `accelerate launch` with the same config file. Rows of a step come as they were drawn,
    not by length: that is ours."""
    from datasets import Dataset

    from finetune.leases import visible_devices
    from finetune.tokens import open_tokens
    from launch import accelerate_command, environment

    output = folder / "trl" / run
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    settings = yaml.safe_load((folder / "ours" / run / "train.yaml").read_text())
    rows, steps = open_tokens(places(folder, run)["tokens"] / "train"), batches(folder, run)
    order = [row for step in steps for row in sorted(step)]
    columns = {name: [rows[i][name] for i in order] for name in ("input_ids", "labels")}
    Dataset.from_dict(columns).save_to_disk(str(output / "rows"))
    told = {
        "method": settings["method"],
        "model": str(places(folder, run)["model"]),
        "rows": str(output / "rows"),
        "lora": settings["method"] == "qlora" and lora_arguments(settings["lora"]),
        "arguments": trl_arguments(settings, read_json(places(folder, run)["plan"]), output),
    }
    command = accelerate_command(settings["launch"], args.processes)
    command[1:2] = ["-m", "accelerate.commands.launch"]
    command += [str(RANKS), "trl", json.dumps(told)]
    env = environment(args.processes, args.processes, visible_devices())
    env["PYTHONPATH"] = str(args.trl.resolve())
    return timed(command, output, steps[1:], env)


def lora_arguments(lora: dict) -> dict:
    return {
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": lora["target_modules"],
    }


def trl_arguments(settings: dict, plan: dict, output: Path) -> dict:
    optimizer = settings["optimizer"]
    return {
        "output_dir": str(output / "out"),
        "per_device_train_batch_size": plan["micro_batch"],
        "gradient_accumulation_steps": plan["accumulation"],
        "max_steps": plan["steps"],
        "learning_rate": plan["learning_rate"],
        "lr_scheduler_type": settings["schedule"]["name"],
        "warmup_steps": settings["schedule"]["warmup"],
        "weight_decay": optimizer["weight_decay"],
        "adam_beta2": optimizer["beta2"],
        "max_grad_norm": optimizer["max_grad_norm"],
        "gradient_checkpointing": plan["gradient_checkpointing"],
        "logging_steps": settings["log_every"],
        "seed": settings["seed"],
    }


def batches(folder: Path, run: str) -> list[list[int]]:
    """Rows of each step, for the default seed."""
    from finetune.sampling import LengthGroups
    from finetune.tokens import open_tokens

    plan = read_json(places(folder, run)["plan"])
    lengths = open_tokens(places(folder, run)["tokens"] / "train")["length"][:]
    size, found = plan["global_batch"], []
    sampler = LengthGroups(lengths, size, seed=0)
    for epoch in range(plan["steps"] // (len(sampler) // size) + 1):
        sampler.set_epoch(epoch)
        rows = list(sampler)
        found += [rows[start : start + size] for start in range(0, len(rows), size)]
    return found[: plan["steps"]]


def timed(
    command: list[str], output: Path, steps: list[list[int]], env: dict | None = None
) -> dict:
    """Run it; add up what its ranks wrote."""
    from finetune.encoding import IGNORED
    from finetune.tokens import open_tokens

    started = time.time()
    more = {"BENCHMARK_STARTED": str(started), "BENCHMARK_OUTPUT": str(output)}
    env = {**os.environ, **(env or {}), **more}
    path = [env.get("PYTHONPATH"), str(SCRIPTS)]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    with open(output / "log", "w") as log:
        done = subprocess.run(command, env=env, stdout=log, stderr=log)
    if done.returncode:
        sys.exit(f"failed; see {output / 'log'}")
    wall = time.time() - started
    ranks = [json.loads(path.read_text()) for path in sorted(output.glob("rank*.json"))]
    rows = open_tokens(output.parents[1] / "results/tokens/intents/smollm2/train")
    chosen = [rows[row] for step in steps for row in step]
    tokens = sum(row["length"] for row in chosen)
    supervised = sum(label != IGNORED for row in chosen for label in row["labels"])
    seconds = max(rank["seconds"] for rank in ranks)
    return {
        "tokens/s": tokens / seconds,
        "supervised tokens/s": supervised / seconds,
        "CPU s per 1000 tokens": sum(rank["cpu"] for rank in ranks) / tokens * 1000,
        "peak GB of a rank": max(rank["peak"] for rank in ranks) / 1e9,
        "set-up s": max(rank["setup"] for rank in ranks),
        "wall s": wall,
        "last loss": ranks[0]["loss"],
    }


def report(run: str, measured: dict[str, list[dict]], processes: int) -> None:
    """Medians; ratios of neighbours, with the lowest and highest."""
    for name, found in measured.items():
        if found:
            medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
            print(f"{run}, {name}: " + ", ".join(f"{k} {v:.4g}" for k, v in medians.items()))
    for one, other, why in (
        ("ours", "trl", "ours / TRL"),
        ("ours", "alone", f"{processes} processes / 1"),
        ("apart", "alone", f"{processes} runs of 1 process at once / 1"),
    ):
        for key in ("tokens/s", "CPU s per 1000 tokens", "peak GB of a rank", "last loss"):
            pairs = zip(measured[one], measured[other], strict=False)
            if ratios := sorted(a[key] / b[key] for a, b in pairs):
                spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
                print(f"{run}, {why}: {key} {statistics.median(ratios):.2f} ({spread})")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
