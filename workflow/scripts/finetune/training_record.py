"""train.json: what a training did and cost, and which settings, data, model and code made it."""

from __future__ import annotations

import torch

from finetune.files import digest_json, read_json
from finetune.history import peaks_reached, seconds_spent
from finetune.launched import Launched
from finetune.modeling import compute_dtype
from finetune.peaks import highest, of_attempt
from finetune.provenance import package_versions, process_seconds
from finetune.trainer import FinetuneTrainer


def run_facts(trainer: FinetuneTrainer, plan: dict, peaks: list[dict], events: list[dict]) -> dict:
    """What the run did and what it cost, over all its launches. `peaks` are those of the ranks
    of the last one."""
    args = trainer.args
    peak = highest([*peaks_reached(events), of_attempt(peaks)])
    return {
        "world_size": args.world_size,
        "micro_batch": args.per_device_train_batch_size,
        "accumulation": args.gradient_accumulation_steps,
        "global_batch": plan["global_batch"],
        "learning_rate": args.learning_rate,
        "precision": str(compute_dtype()).removeprefix("torch."),
        "compiled": plan["settings"]["compile"],
        "attention": trainer.model.config._attn_implementation,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "tokens": trainer.total_tokens,
        "tokens_per_second": trainer.total_tokens / trainer.training_seconds,
        "training_seconds": trainer.training_seconds,
        "peak_memory": peak,
        "memory": compared(plan["memory"], peak),
        "wall_seconds": seconds_spent(events) + process_seconds(),
    }


def compared(planned: dict, peak: dict[str, int]) -> dict[str, dict[str, int | None]]:
    """Predicted and measured bytes side by side: of the largest process, on its GPU where there is
    one, and of all on the host. None: uncalibrated, or not measured where the plan was for a GPU
    and there was none."""
    predicted = {"process": planned["total"], "node": planned["host"]["train"]}
    on_host = peak["host"] if planned["cpu"] else None
    measured = {"process": peak.get("gpu", on_host), "node": peak["host_node"]}
    return {
        kind: {
            "predicted": predicted[kind],
            "corrected": (planned["calibration"][kind] or {}).get("corrected"),
            "measured": measured[kind],
        }
        for kind in measured
    }


def provenance(launched: Launched, facts: dict, code: str | None) -> dict:
    """Which settings, data, model and code made the result. The data were digested for `facts`,
    before a GPU was taken; train.py started by hand has none."""
    model, settings = read_json(launched.model.parent / "model.json"), launched.settings
    return {
        "run": launched.output.parent.name,
        "model_name": settings["model"],
        "dataset_name": settings["dataset"],
        "settings": settings,
        "settings_digest": digest_json(settings),
        "data_digests": {
            "train": facts.get("data_digest"),
            "validation": facts.get("validation_digest"),
        },
        "model": {key: model[key] for key in ("source", "commit", "parameters")},
        "model_digest": digest_json(model["files"]),
        "versions": package_versions(),
        "code": code,
    }
