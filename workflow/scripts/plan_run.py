"""Rule plan_run: how the batch is split and whether the run fits, before a GPU is asked for.

Reads the run's settings, `model.json` and `lint.json`; loads no weights. Writes `plan.json`.
A run that cannot work ends here, with what to change.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from finetune.advice import cheaper
from finetune.batch import split_batch
from finetune.checks import failed_checks
from finetune.cli import UserError, read_settings, run_script, say
from finetune.files import read_json, write_json
from finetune.memory import ModelShapes, training_memory
from finetune.splits import SPLITS

GB = 1e9
LARGE = 14e9
"""Above a "13B" model (13.02e9 for LLaMA) the QLoRA paper halves the learning rate (table 9)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", required=True, type=read_settings)
    parser.add_argument("--model", required=True, type=Path, help="model.json")
    parser.add_argument("--lint", required=True, type=Path, help="lint.json")
    parser.add_argument("--output", required=True, type=Path, help="plan.json")
    args = parser.parse_args()

    model, lint = read_json(args.model), read_json(args.lint)
    check_task(args.settings["task"], model, lint)
    check_data(lint, args.settings["checks"], args.lint.with_suffix(".html"))
    plan = batch_plan(args.settings, lint["train"]["sequences"])
    plan["learning_rate"] = learning_rate(args.settings, model["parameters"])
    plan["memory"] = memory_plan(args.settings, model, lint)
    plan["settings"] = args.settings
    check_context(model, max(lint[split]["longest"] for split in SPLITS))
    write_json(args.output, plan)
    say("plan_run: " + summary(plan))


def check_data(lint: dict, checks: dict, page: Path) -> None:
    """Data that fails a check of its dataset is not trained on."""
    if failed := failed_checks(lint, checks):
        raise UserError(f"the data check failed (see {page}): {' '.join(failed)}")


def check_task(task: str, model: dict, lint: dict) -> None:
    """The task, the data and the model must be made for each other."""
    if task == "causal-lm" and lint["task"] != task:
        raise UserError(
            "this data set has a label for each row: set `task: sequence-classification` for the "
            "run. Or, to have the label written as text, map the columns under the dataset: "
            "`format: prompt-completion`, `columns: {prompt: text, completion: label}`."
        )
    if task == "sequence-classification" and lint["task"] != task:
        raise UserError(
            "task sequence-classification needs a label for each row, and this data set has none. "
            "Give it the columns `text` and `label`, or map yours under the dataset: `format: "
            "text-label`, `columns: {text: …, label: …}`."
        )
    if task == "causal-lm" and not model["causal"]:
        raise UserError(
            f"{model['architecture']} writes no text, so it cannot be trained for `task: "
            "causal-lm`. Use it for `sequence-classification`, or choose a causal language model."
        )


def batch_plan(settings: dict, rows: int) -> dict:
    """Micro-batch, accumulation and steps. Every step sees exactly batch.global rows."""
    size, micro = settings["batch"]["global"], settings["batch"]["micro"]
    world = settings["gpus"] * settings["nodes"]
    if rows < size:
        raise UserError(f"{rows} training rows do not fill one batch; set batch.global <= {rows}.")
    steps_per_epoch = rows // size
    length = steps_per_epoch * (settings["epochs"] or 1)
    # 100 steps x 0.07 epochs is 7.000000000000001 as a float, and 7 to people
    steps = settings["steps"] or max(1, math.ceil(round(length, 6)))
    return {
        "world_size": world,
        "global_batch": size,
        "micro_batch": micro,
        "accumulation": split_batch(size, micro, world),
        "steps_per_epoch": steps_per_epoch,
        "steps": steps,
        "rows_unseen_per_epoch": rows % size,
    }


def learning_rate(settings: dict, parameters: int) -> float:
    """The run's own, or the method's: QLoRA paper for adapters, common practice for full; for
    full classifiers Devlin et al. 2018 (arXiv 1810.04805, A.3: 5e-5, 3e-5 or 2e-5)."""
    if (chosen := settings["optimizer"]["learning_rate"]) is not None:
        return chosen
    if settings["method"] == "full":
        return 1e-5 if settings["task"] == "causal-lm" else 2e-5
    return 2e-4 if parameters <= LARGE else 1e-4


def memory_plan(settings: dict, model: dict, lint: dict) -> dict:
    """Predicted bytes by part against what a GPU has. Raises UserError when it cannot fit."""
    lora = settings.get("lora", {"rank": 0, "target_modules": []})
    check_targets(lora["target_modules"], model)
    parts = training_memory(
        ModelShapes.of(model, lora["rank"], lora["target_modules"]),
        method=settings["method"],
        launch=settings["launch"],
        gpus=settings["gpus"] * settings["nodes"],
        double=settings.get("quantization", {}).get("double", False),
        micro=settings["batch"]["micro"],
        length=lint["train"]["longest"],
        checkpointing=settings["gradient_checkpointing"],
        classes=len(lint["labels"]) if lint["labels"] else None,
    )
    total, (available, seen) = sum(parts.values()), device_memory(settings)
    if available is not None and total > available:
        raise UserError(
            f"needs about {total / GB:.1f} GB on each GPU, but each has {available / GB:.1f} "
            f"({seen}). {cheaper(settings, parts)}"
        )
    return {"parts": parts, "total": total, "available": available, "device": seen}


def check_targets(targets: str | list[str], model: dict) -> None:
    names = sorted({layer["name"] for layer in model["linear_layers"]})
    if unknown := [t for t in targets if isinstance(targets, list) and t not in names]:
        raise UserError(
            f"lora.target_modules {', '.join(unknown)}: no such linear layer in this model; it "
            f"has {', '.join(names)}."
        )


def device_memory(settings: dict) -> tuple[float | None, str]:
    """Bytes for one process, and where the number is from."""
    if settings["gpu_memory_gb"]:
        return settings["gpu_memory_gb"] * GB, "gpu_memory_gb"
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return device.total_memory, device.name
    return None, "no GPU seen here; set gpu_memory_gb to have it checked"


def check_context(model: dict, longest: int) -> None:
    if model["context"] is not None and longest > model["context"]:
        raise UserError(
            f"the longest row has {longest} tokens, but the model's context is "
            f"{model['context']}; set max_length under the dataset to at most that."
        )


def summary(plan: dict) -> str:
    split = f"{plan['micro_batch']} x {plan['accumulation']} x {plan['world_size']}"
    memory = f"{plan['memory']['total'] / GB:.1f} GB per GPU predicted"
    return f"{plan['steps']} steps of {plan['global_batch']} rows = {split}; {memory}"


if __name__ == "__main__":
    run_script(main)
