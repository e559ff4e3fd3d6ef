"""train.json: what a training did and cost, and which settings, data, model and code made it."""

from __future__ import annotations

import argparse

import torch

from finetune.files import digest_json, read_json
from finetune.history import seconds_spent
from finetune.modeling import compute_dtype
from finetune.provenance import package_versions, process_seconds
from finetune.tokens import digest_tokens
from finetune.trainer import FinetuneTrainer


def run_facts(trainer: FinetuneTrainer, plan: dict, peaks: list[dict], events: list[dict]) -> dict:
    """What the run did and what it cost, over all its launches; the peaks are the last one's."""
    args = trainer.args
    return {
        "world_size": args.world_size,
        "micro_batch": args.per_device_train_batch_size,
        "accumulation": args.gradient_accumulation_steps,
        "global_batch": plan["global_batch"],
        "learning_rate": args.learning_rate,
        "precision": str(compute_dtype()).removeprefix("torch."),
        "attention": trainer.model.config._attn_implementation,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "tokens": trainer.total_tokens,
        "tokens_per_second": trainer.total_tokens / trainer.training_seconds,
        "peak_memory": {kind: max(p[kind] for p in peaks) for kind in peaks[0]},
        "predicted_memory": plan["memory"]["total"],
        "wall_seconds": seconds_spent(events) + process_seconds(),
    }


def provenance(settings: dict, args: argparse.Namespace, code: str | None) -> dict:
    """Which settings, data, model and code made the result."""
    model = read_json(args.model.parent / "model.json")
    return {
        "run": args.output.parent.name,
        "model_name": settings["model"],
        "dataset_name": settings["dataset"],
        "settings": settings,
        "settings_digest": digest_json(settings),
        "data_digests": {
            split: digest_tokens(args.tokens / split) for split in ("train", "validation")
        },
        "model": {key: model[key] for key in ("source", "commit", "parameters")},
        "model_digest": digest_json(model["files"]),
        "versions": package_versions(),
        "code": code,
    }
