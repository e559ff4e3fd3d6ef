"""Rule plan_run: how the batch is split and whether the run fits, before a GPU is asked for.

Reads the run's settings, the model's config, `model.json` and `lint.json`; loads no weights.
Writes `plan.json`. A run that cannot work ends here, with the smallest change that helps.

Without a run it answers what would fit:

    python workflow/scripts/plan_run.py --model Qwen/Qwen2.5-7B --gpus 4 --gpu-memory 24
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from finetune import cli
from finetune.batch import split_batch
from finetune.calibration import Finished, read
from finetune.cli import UserError, read_settings, run_script, say, speak_for
from finetune.config import Dataset, Method, Model, Run, complete_run, default_learning_rate
from finetune.config_errors import readable
from finetune.devices import GB, find_device
from finetune.files import read_json, write_json
from finetune.gpu_models import GPU_MODELS
from finetune.memory import Job
from finetune.neighbours import neighbours, table
from finetune.outlook import checked, job_of, memory_section, outlook, request_of, shapes_in
from finetune.refusals import (
    check_adapters,
    check_attention,
    check_compile,
    check_context,
    check_data,
    check_evaluation,
    check_rows,
    check_task,
)
from finetune.shapes import Shapes, recorded
from finetune.splits import SPLITS
from finetune.stages import plan_settings

RULE = ("settings", "pretrained", "lint", "calibration", "output")
"""Options that the rule gives, beside --model."""


def main() -> None:
    args = parse()
    if args.settings is None:
        show_outlook(args)
        return
    speak_for(args.output.parent.name)
    model, lint = read_json(Path(args.model)), read_json(args.lint)
    check_task(args.settings["task"], lint)
    check_data(lint, args.settings["checks"], args.lint.with_suffix(".html"))
    check_rows(args.settings["batch"]["global"], lint["train"]["sequences"])
    check_context(model["context"], max(lint[split]["longest"] for split in SPLITS))
    check_attention(args.settings, lint, args.pretrained)
    check_compile(args.settings)
    shapes = shapes_for(args, model, lint["labels"])
    plan = make_plan(args.settings, shapes, lint, earlier_runs(args.calibration))
    check_evaluation(args.settings, shapes, find_device(args.settings))
    write_json(args.output, plan)
    print(table(plan["neighbours"]), file=sys.stderr)
    say(summary(plan))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="model.json; or a hub id, folder or config")
    rule = parser.add_argument_group("a run of the workflow, as the rule gives it")
    rule.add_argument("--settings", type=read_settings)
    rule.add_argument("--pretrained", type=Path, help="folder of fetch_model")
    rule.add_argument("--lint", type=Path, help="lint.json")
    rule.add_argument("--calibration", type=Path, help="calibration.jsonl of earlier runs")
    rule.add_argument("--output", type=Path, help="plan.json")
    free = parser.add_argument_group("no run: what would fit. Defaults are those of the config")
    free.add_argument("--gpus", type=int)
    free.add_argument("--gpu-memory", type=float, metavar="GB", help="of one GPU; 1 GB = 1e9 bytes")
    free.add_argument("--gpu-model", choices=GPU_MODELS)
    free.add_argument("--method", choices=get_args(Method))
    free.add_argument("--length", type=int, help="tokens of a row; at most the model's context")
    free.add_argument("--batch", type=int, help="rows per optimizer step")
    free.add_argument("--lora-rank", type=int)
    args = parser.parse_args()
    check_options(parser, args)
    return args


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """No option is ignored."""
    given = {name for name, value in vars(args).items() if value is not None}
    if "settings" not in given:
        if alone := [name for name in RULE if name in given]:
            parser.error(f"{flags(alone)}: only with --settings")
        return
    if free := [name for name in vars(args) if name in given and name not in ("model", *RULE)]:
        parser.error(f"{flags(free)}: not beside --settings, which say it for the run")
    if missing := [name for name in RULE if name not in given]:
        parser.error(f"--settings needs {flags(missing)}")


def flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def earlier_runs(path: Path) -> list[Finished]:
    """What a line cannot be read of is no reason not to plan."""
    lines, damaged = read(path)
    if damaged:
        say(f"{path}: {damaged} damaged lines are not used")
    return lines


def show_outlook(args: argparse.Namespace) -> None:
    """The table alone, on stdout."""
    run, dataset = asked(args)
    settings = plan_settings(run, dataset, Model(source=args.model))
    settings["lora"] = run.lora.model_dump()  # for the other methods, if this one has none
    shapes, device = shapes_in(args.model, False), find_device(settings)
    length = args.length or min(dataset.max_length, shapes.context or dataset.max_length)
    check_context(shapes.context, length)
    rows = {"longest": length, "most_supervised": length}
    entries = outlook(shapes, settings, {"train": rows, "validation": rows, "labels": None}, device)
    where = f"{device.name}, {device.available / GB:.1f} GB"
    if device.cpu:
        where = f"{device.name} (for GPUs: --gpu-memory or --gpu-model)"
    print(f"{args.model}, rows of {length} tokens, all supervised; {where}", file=cli.terminal)
    print(table(entries), file=cli.terminal, flush=True)


def asked(args: argparse.Namespace) -> tuple[Run, Dataset]:
    """As the config has them, by whose rules they are checked."""
    keys = {"method": args.method, "gpus": args.gpus}
    keys |= {"gpu_memory_gb": args.gpu_memory, "gpu_model": args.gpu_model}
    keys |= {"batch": chosen({"global": args.batch}), "lora": chosen({"rank": args.lora_rank})}
    run = {"model": "m", "dataset": "d"} | chosen(keys)
    try:
        rows = Dataset(source="-", **chosen({"max_length": args.length}))
        return Run.model_validate(complete_run({}, run)), rows
    except ValidationError as error:
        faults = (f"{'.'.join(key)}: {text}" for key, text in readable(error, keys))
        raise UserError("; ".join(fault.removeprefix(": ") for fault in faults)) from error


def chosen(options: dict) -> dict:
    """Without those that were left out: the config has their defaults."""
    return {name: value for name, value in options.items() if value is not None}


def make_plan(settings: dict, shapes: Shapes, lint: dict, earlier: Sequence[Finished] = ()) -> dict:
    """All of plan.json. Raises UserError for a run that cannot work."""
    check_adapters(settings.get("lora"), shapes)
    device = find_device(settings)
    request = request_of(settings, shapes, device, earlier)
    job = job_of(settings, shapes, lint, device)
    job = checked(request, job, settings["allow_oversubscription"])
    plan = batch_plan(settings, job, lint["train"]["sequences"])
    plan["learning_rate"] = settings["optimizer"]["learning_rate"] or default_learning_rate(
        settings["method"], settings["task"], shapes.parameters
    )
    plan["memory"] = memory_section(request, job)
    plan["time"] = request.earlier.time(job, tokens_seen(plan, lint["train"]))
    plan["neighbours"] = neighbours(request, job)
    return plan | {"settings": settings}


def shapes_for(args: argparse.Namespace, model: dict, labels: list[str] | None) -> Shapes:
    """From model.json, which takes 4 s less than to build the model's outline again. The head of
    a classifier is counted here: it is as large as the data have classes."""
    known = recorded(model.get("shapes")) if labels is None else None
    return known or shapes_in(args.pretrained, args.settings["trust_remote_code"], labels)


def batch_plan(settings: dict, job: Job, rows: int) -> dict:
    """Micro-batch, accumulation and steps. Every step sees exactly batch.global rows."""
    size = settings["batch"]["global"]
    steps_per_epoch = rows // size
    # 100 steps x 0.07 epochs is 7.000000000000001 as a float, and 7 to people
    steps = settings["steps"] or max(1, math.ceil(round(steps_per_epoch * settings["epochs"], 6)))
    return {
        "world_size": job.world,
        "global_batch": size,
        "micro_batch": job.micro,
        "accumulation": split_batch(size, job.micro, job.world),
        "gradient_checkpointing": job.checkpointing,
        "steps_per_epoch": steps_per_epoch,
        "steps": steps,
        "rows_unseen_per_epoch": rows % size,
    }


def tokens_seen(plan: dict, train: dict) -> int:
    """Tokens of all steps, padding left out."""
    return round(train["tokens"] * plan["steps"] * plan["global_batch"] / train["sequences"])


def summary(plan: dict) -> str:
    split = f"{plan['micro_batch']} x {plan['accumulation']} x {plan['world_size']}"
    again = ", activations recomputed" if plan["gradient_checkpointing"] else ""
    memory = plan["memory"]
    used = f"{memory['total'] / GB:.1f} of {memory['available'] / GB:.1f} GB"
    time = f"; about {plan['time']['seconds'] / 60:.0f} min" if plan["time"] else ""
    unseen = (
        f" ({left} rows left out of each epoch)" if (left := plan["rows_unseen_per_epoch"]) else ""
    )
    return (
        f"{plan['steps']} steps of {plan['global_batch']} rows = {split}{again}{unseen}; {used} "
        f"for each predicted ({memory['device']}), {learned(memory)}{time}"
    )


def learned(memory: dict) -> str:
    """What earlier runs say of the prediction."""
    found = memory["calibration"]["process"]
    if found is None:
        return "uncalibrated"
    return (
        f"{found['corrected'] / GB:.1f} corrected by earlier runs: {found['runs']}, measured / "
        f"predicted {found['low']:.2f} to {found['high']:.2f}"
    )


if __name__ == "__main__":
    run_script(main)
