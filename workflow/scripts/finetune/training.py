"""One training, in one rank: what the Trainer is told, what watches it, what it leaves.

Nothing here depends on how the ranks were started beyond what the Trainer needs.
"""

from __future__ import annotations

import argparse
import shutil
import warnings
from pathlib import Path

import torch
import yaml
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PrinterCallback, TrainingArguments, set_seed

from finetune.attention import longest_row
from finetune.batch import split_batch
from finetune.checkpoints import step_of
from finetune.classification import ClassificationTrainer, LabelCollator
from finetune.collator import RowCollator
from finetune.compiling import CompiledSteps, check_compiler
from finetune.counters import RestoreCounters
from finetune.facts import read_facts
from finetune.faults import Place
from finetune.files import publish, read_json, write_aside, write_json
from finetune.guards import (
    GradientGuard,
    PlacementGuard,
    check_cuda,
    check_world_size,
    refuse_data_parallel,
)
from finetune.heap import free_at_once
from finetune.history import read_history
from finetune.metric_lines import LINES, lacks_validation
from finetune.modeling import compute_dtype, load_for_training
from finetune.outcome import claim
from finetune.peaks import PeakMemory
from finetune.progress import Progress
from finetune.provenance import code_commit
from finetune.sampling import GROUPED
from finetune.stopping import Stopper
from finetune.tokenizer import load_tokenizer
from finetune.tokens import open_tokens
from finetune.trainer import FinetuneTrainer
from finetune.training_record import provenance, run_facts
from finetune.watchdog import Watchdog

CODE = code_commit()  # before a later commit can be taken for the code that runs
TRAINERS = {"causal-lm": FinetuneTrainer, "sequence-classification": ClassificationTrainer}
OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_8bit"}
"""Names that transformers has for them. The fused one takes a seventh of the time on a CPU."""
SECONDS_AFTER_WATCHDOG = 600
"""Collectives wait longer than the watchdog does: it shows where ranks are, they only end."""


def train(args: argparse.Namespace, place: Place, memory: PeakMemory) -> None:
    check_cuda()
    settings, plan = yaml.safe_load(args.config.read_text()), read_json(args.plan)
    how = plan["settings"]  # with the keys that change no result, which train.yaml lacks
    # DeepSpeed calls collectives by their old names: 500 warnings a step
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
    refuse_data_parallel()
    training_args = arguments(settings, plan, args)
    check_world_size(training_args.world_size, args.world_size)
    watchdog = Watchdog(args.state, how["timeout_minutes"], training_args.process_index, place)
    set_seed(settings["seed"])
    if how["compile"]:
        check_compiler(cpu=not torch.cuda.is_available())
    lint, rank = read_json(args.tokens / "lint.json"), training_args.local_process_index
    longest, packed = longest_row(lint), lint["packing"]["used"]
    model = load_for_training(args.model, settings, rank, lint["labels"], longest, packed)
    trainer = build_trainer(model, training_args, settings, args, lint["packing"])
    check_world_size(trainer.accelerator.num_processes, args.world_size)
    free_at_once()  # not before: a model loads faster while freed pages stay
    trainer.add_callback(watchdog)
    trainer.add_callback(placement := PlacementGuard())
    trainer.add_callback(gradients := GradientGuard(model))
    if how["compile"]:
        trainer.add_callback(CompiledSteps(model, gradients))
    minutes = how["checkpoint_minutes"]
    trainer.stop_with(stopper := Stopper(args.state, minutes, training_args.device))
    trainer.facts = read_facts(args.state)
    if args.resume:
        trainer.add_callback(RestoreCounters(trainer, args.resume))
    trainer.train(resume_from_checkpoint=args.resume and str(args.resume))
    if stopper.stopped:
        claim_stopped(trainer, args.state, bool(stopper.late))
        return
    watchdog.beat()
    save(trainer, args.output)
    checked = {"placement": placement.record, "gradient_checks": gradients.checks}
    leave_record(trainer, settings, plan, args, memory, checked)
    trainer.accelerator.end_training()


def leave_record(
    trainer: FinetuneTrainer,
    settings: dict,
    plan: dict,
    args: argparse.Namespace,
    memory: PeakMemory,
    checked: dict,
) -> None:
    """metrics.jsonl and train.json. Every rank tells its peak memory, rank 0 writes."""
    peaks = gather_object([memory.look()])
    if not trainer.is_world_process_zero():
        return
    with write_aside(args.metrics) as aside:
        shutil.copyfile(args.state / LINES, aside)
    events = read_history(args.state)
    facts = run_facts(trainer, plan, peaks, events) | checked | {"events": events}
    write_json(args.record, facts | provenance(settings, args, trainer.facts, CODE))


def claim_stopped(trainer: FinetuneTrainer, state: Path, late: bool) -> None:
    """Nothing that Snakemake knows of is written: it must not take this run for finished."""
    if trainer.is_world_process_zero():
        claim(state, "stopped", step=trainer.state.global_step, late=late)
    trainer.accelerator.wait_for_everyone()


def arguments(settings: dict, plan: dict, args: argparse.Namespace) -> TrainingArguments:
    """TrainingArguments. Everything here that is not the user's choice has its reason."""
    dtype, optimizer = compute_dtype(), settings["optimizer"]
    every, validation = settings["validate_every"], open_tokens(args.tokens / "validation")
    step = step_of(args.resume) if args.resume else 0
    return TrainingArguments(
        output_dir=str(args.state),
        use_cpu=not torch.cuda.is_available(),  # else bf16 on a CPU is refused
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        per_device_train_batch_size=args.micro_batch,
        per_device_eval_batch_size=args.micro_batch,
        gradient_accumulation_steps=split_batch(
            plan["global_batch"], args.micro_batch, args.world_size
        ),
        max_steps=plan["steps"],
        optim=OPTIMIZERS[optimizer["name"]],
        learning_rate=plan["learning_rate"],
        weight_decay=optimizer["weight_decay"],
        adam_beta2=optimizer["beta2"],
        max_grad_norm=optimizer["max_grad_norm"],
        lr_scheduler_type=settings["schedule"]["name"],
        warmup_steps=settings["schedule"]["warmup"],  # below 1: a share of the steps
        activation_checkpointing=plan["gradient_checkpointing"],
        # reentrant checkpointing under DDP marks parameters ready twice (peft issue 313)
        activation_checkpointing_kwargs={"use_reentrant": False},
        ddp_find_unused_parameters=False,
        eval_strategy=("steps" if every else "epoch") if len(validation) else "no",
        eval_steps=every,
        eval_on_start=len(validation) > 0
        and lacks_validation(args.state / LINES, step, plan, every),
        logging_steps=settings["log_every"],
        logging_nan_inf_filter=False,  # it would print a NaN as 0.0
        save_strategy="no",  # Stopper decides
        remove_unused_columns=False,  # batches carry the row's index for error messages
        seed=settings["seed"],
        data_seed=settings["seed"],
        disable_tqdm=True,
        report_to="none",
        ddp_timeout=int(plan["settings"]["timeout_minutes"] * 60) + SECONDS_AFTER_WATCHDOG,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def build_trainer(
    model: torch.nn.Module, training_args: TrainingArguments, settings: dict, args, packing: dict
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
        grouped=grouping(packing),
    )
    trainer.remove_callback(PrinterCallback)
    if trainer.is_world_process_zero():
        trainer.add_callback(Progress(args.output.parent.name, args.state / LINES))
    return trainer


def grouping(packing: dict) -> int:
    """How far rows are grouped by length: far, where packing was asked for and cannot be."""
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
