"""Rule train, inside each process that launch.py starts: fine-tune, save once, record.

One script for every method and launcher. Reads the frozen settings, token folders, the model
folder and plan.json. Rank 0 writes `trained/` (the adapter, or all weights in 16 bit),
`metrics.jsonl` and `train.json`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import torch
import yaml
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PrinterCallback, TrainingArguments, set_seed

from finetune.batch import split_batch
from finetune.classification import ClassificationTrainer, LabelCollator
from finetune.cli import run_script
from finetune.collator import RowCollator
from finetune.files import digest_json, publish, read_json, write_json
from finetune.guards import (
    GradientGuard,
    PlacementGuard,
    check_world_size,
    refuse_data_parallel,
)
from finetune.modeling import compute_dtype, load_for_training
from finetune.progress import Progress
from finetune.provenance import code_commit, package_versions, peak_memory, process_seconds
from finetune.sampling import GROUPED
from finetune.tokenizer import load_tokenizer
from finetune.tokens import digest_tokens, open_tokens
from finetune.trainer import FinetuneTrainer

CODE = code_commit()  # before a later commit can be taken for the code that runs
TRAINERS = {"causal-lm": FinetuneTrainer, "sequence-classification": ClassificationTrainer}


def main() -> None:
    args = parse()
    settings, plan = yaml.safe_load(args.config.read_text()), read_json(args.plan)
    refuse_data_parallel()
    training_args = arguments(settings, plan, args)
    check_world_size(training_args.world_size, args.world_size)
    set_seed(settings["seed"])
    labels = read_json(args.tokens / "lint.json")["labels"]
    model = load_for_training(args.model, settings, training_args.local_process_index, labels)
    trainer = build_trainer(model, training_args, settings, args)
    check_world_size(trainer.accelerator.num_processes, args.world_size)
    trainer.add_callback(placement := PlacementGuard())
    trainer.add_callback(gradients := GradientGuard(model))
    trainer.train()
    save(trainer, args.output)
    peaks = gather_object([peak_memory()])
    if trainer.is_world_process_zero():
        checked = {"placement": placement.record, "gradient_checks": gradients.checks}
        facts = run_facts(trainer, plan, peaks) | checked
        write_json(args.record, facts | provenance(settings, args))
    trainer.accelerator.end_training()
    leave()


def leave() -> NoReturn:
    """End this process with all files written, and without taking the interpreter down.

    torch and DeepSpeed keep gloo's process groups, and so their threads, after the groups are
    destroyed. A thread that wants the GIL while the interpreter goes down is ended by force,
    which C++ answers with an abort (SIGABRT, "terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, type=Path, help="frozen settings (YAML)")
    parser.add_argument("--plan", required=True, type=Path)
    parser.add_argument("--tokens", required=True, type=Path, help="folder of tokenize_data")
    parser.add_argument("--model", required=True, type=Path, help="pretrained/ of fetch_model")
    parser.add_argument("--output", required=True, type=Path, help="trained/")
    parser.add_argument("--metrics", required=True, type=Path)
    parser.add_argument("--record", required=True, type=Path)
    parser.add_argument("--world-size", required=True, type=int)
    return parser.parse_args()


def arguments(settings: dict, plan: dict, args: argparse.Namespace) -> TrainingArguments:
    """TrainingArguments. Everything here that is not the user's choice has its reason."""
    dtype, optimizer = compute_dtype(), settings["optimizer"]
    every, validation = settings["validate_every"], open_tokens(args.tokens / "validation")
    return TrainingArguments(
        output_dir=str(args.output.parent / "checkpoints"),
        use_cpu=not torch.cuda.is_available(),  # else bf16 on a CPU is refused
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        per_device_train_batch_size=plan["micro_batch"],
        per_device_eval_batch_size=plan["micro_batch"],
        gradient_accumulation_steps=split_batch(
            plan["global_batch"], plan["micro_batch"], args.world_size
        ),
        max_steps=plan["steps"],
        learning_rate=plan["learning_rate"],
        weight_decay=optimizer["weight_decay"],
        adam_beta2=optimizer["beta2"],
        max_grad_norm=optimizer["max_grad_norm"],
        lr_scheduler_type=settings["schedule"]["name"],
        warmup_steps=settings["schedule"]["warmup"],  # below 1: a share of the steps
        activation_checkpointing=settings["gradient_checkpointing"],
        # reentrant checkpointing under DDP marks parameters ready twice (peft issue 313)
        activation_checkpointing_kwargs={"use_reentrant": False},
        ddp_find_unused_parameters=False,
        eval_strategy=("steps" if every else "epoch") if len(validation) else "no",
        eval_steps=every,
        logging_steps=settings["log_every"],
        logging_nan_inf_filter=False,  # it would print a NaN as 0.0
        save_strategy="no",
        remove_unused_columns=False,  # batches carry the row's index for error messages
        seed=settings["seed"],
        data_seed=settings["seed"],
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def build_trainer(
    model: torch.nn.Module, training_args: TrainingArguments, settings: dict, args
) -> FinetuneTrainer:
    tokenizer = load_tokenizer(args.model, settings["trust_remote_code"])
    tokenizer.padding_side = "right"
    attention = model.config._attn_implementation
    causal = settings["task"] == "causal-lm"
    trainer = TRAINERS[settings["task"]](
        model=model,
        args=training_args,
        train_dataset=open_tokens(args.tokens / "train"),
        eval_dataset=open_tokens(args.tokens / "validation"),
        data_collator=RowCollator(tokenizer, attention) if causal else LabelCollator(tokenizer),
        processing_class=tokenizer,
        grouped=grouping(args.tokens),
    )
    trainer.remove_callback(PrinterCallback)
    if trainer.is_world_process_zero():
        trainer.add_callback(Progress(args.output.parent.name, args.metrics))
    return trainer


def grouping(tokens: Path) -> int:
    """How far rows are grouped by length: far, where packing was asked for and cannot be."""
    packing = read_json(tokens / "lint.json")["packing"]
    return GROUPED if packing["asked"] and not packing["used"] else 1


def save(trainer: FinetuneTrainer, output: Path) -> None:
    """The adapter or all weights in 16 bit. Every rank gathers, rank 0 writes."""
    if not trainer.is_deepspeed_enabled and isinstance(trainer.model, PreTrainedModel):
        trainer.model.to(compute_dtype())  # full fine-tuning under DDP holds fp32 weights
    aside = output.with_name(f".{output.name}.partial")
    if trainer.is_world_process_zero():
        shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed while it saved
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(aside))
    if trainer.is_world_process_zero():
        (aside / "training_args.bin").unlink()  # a pickle; train.json holds the same
        publish(aside, output)
    trainer.accelerator.wait_for_everyone()


def run_facts(trainer: FinetuneTrainer, plan: dict, peaks: list[dict]) -> dict:
    """What the run did and what it cost."""
    args = trainer.args
    return {
        "world_size": args.world_size,
        "micro_batch": args.per_device_train_batch_size,
        "accumulation": args.gradient_accumulation_steps,
        "global_batch": plan["global_batch"],
        "learning_rate": args.learning_rate,
        "precision": str(compute_dtype()).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "tokens": trainer.total_tokens,
        "tokens_per_second": trainer.total_tokens / trainer.training_seconds,
        "peak_memory": {kind: max(p[kind] for p in peaks) for kind in peaks[0]},
        "predicted_memory": plan["memory"]["total"],
        "wall_seconds": process_seconds(),
    }


def provenance(settings: dict, args: argparse.Namespace) -> dict:
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
        "code": CODE,
    }


if __name__ == "__main__":
    run_script(main)
