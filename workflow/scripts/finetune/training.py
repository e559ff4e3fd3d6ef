"""One training, in one rank: what it loads, what watches it, what it leaves.

Nothing here depends on how the ranks were started beyond what the Trainer needs.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PrinterCallback, TrainingArguments, set_seed

from finetune.arguments import arguments
from finetune.attention import longest_row
from finetune.classification import ClassificationTrainer, LabelCollator
from finetune.collator import RowCollator
from finetune.compiling import CompiledSteps, check_compiler
from finetune.counters import RestoreCounters
from finetune.facts import read_facts
from finetune.faults import Place
from finetune.files import aside_of, publish, write_aside, write_json
from finetune.guards import (
    GradientGuard,
    PlacementGuard,
    check_cuda,
    check_world_size,
    refuse_data_parallel,
)
from finetune.heap import free_at_once
from finetune.history import read_history
from finetune.launched import Launched
from finetune.metric_lines import LINES
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
Guards = tuple[PlacementGuard, GradientGuard]


def train(launched: Launched, place: Place, memory: PeakMemory) -> None:
    check_cuda()
    # DeepSpeed calls collectives by their old names: 500 warnings a step
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
    refuse_data_parallel()
    args = arguments(launched)
    check_world_size(args.world_size, launched.world_size)
    minutes = launched.how["timeout_minutes"]
    watchdog = Watchdog(launched.state, minutes, args.process_index, place)
    trainer = build_trainer(load_model(launched, args), args, launched)
    check_world_size(trainer.accelerator.num_processes, launched.world_size)
    free_at_once()  # not before: a model loads faster while freed pages stay
    trainer.add_callback(watchdog)
    guards = add_guards(trainer, launched)
    stopper = go_on_and_stop(trainer, launched)
    trainer.train(resume_from_checkpoint=launched.resume and str(launched.resume))
    if stopper.stopped:
        claim_stopped(trainer, launched.state, bool(stopper.late))
        return
    watchdog.beat()
    save(trainer, launched.output)
    leave_record(trainer, launched, memory, guards)
    trainer.accelerator.end_training()


def load_model(launched: Launched, args: TrainingArguments) -> torch.nn.Module:
    """The same in each rank: from one seed."""
    settings, lint = launched.settings, launched.lint
    set_seed(settings["seed"])
    if launched.how["compile"]:
        check_compiler(cpu=not torch.cuda.is_available())
    return load_for_training(
        launched.model,
        settings,
        args.local_process_index,
        lint["labels"],
        longest_row(lint),
        lint["packing"]["used"],
    )


def add_guards(trainer: FinetuneTrainer, launched: Launched) -> Guards:
    trainer.add_callback(placement := PlacementGuard())
    trainer.add_callback(gradients := GradientGuard(trainer.model))
    if launched.how["compile"]:
        trainer.add_callback(CompiledSteps(trainer.model, gradients))
    return placement, gradients


def go_on_and_stop(trainer: FinetuneTrainer, launched: Launched) -> Stopper:
    """From the checkpoint that it resumes, and when it is told to."""
    stopper = Stopper(launched.state, launched.how["checkpoint_minutes"], trainer.args.device)
    trainer.stop_with(stopper)
    trainer.facts = read_facts(launched.state)
    if launched.resume:
        trainer.add_callback(RestoreCounters(trainer, launched.resume))
    return stopper


def leave_record(
    trainer: FinetuneTrainer, launched: Launched, memory: PeakMemory, guards: Guards
) -> None:
    """metrics.jsonl and train.json. Every rank tells its peak memory, rank 0 writes."""
    peaks = gather_object([memory.look()])
    if not trainer.is_world_process_zero():
        return
    with write_aside(launched.metrics) as aside:
        shutil.copyfile(launched.state / LINES, aside)
    events, (placement, gradients) = read_history(launched.state), guards
    facts = run_facts(trainer, launched.planned, peaks, events)
    facts |= {"placement": placement.record, "gradient_checks": gradients.checks, "events": events}
    write_json(launched.record, facts | provenance(launched, trainer.facts, CODE))


def claim_stopped(trainer: FinetuneTrainer, state: Path, late: bool) -> None:
    """Nothing that Snakemake knows of is written: it must not take this run for finished."""
    if trainer.is_world_process_zero():
        claim(state, "stopped", step=trainer.state.global_step, late=late)
    trainer.accelerator.wait_for_everyone()


def build_trainer(
    model: torch.nn.Module, args: TrainingArguments, launched: Launched
) -> FinetuneTrainer:
    settings, tokens = launched.settings, launched.tokens
    tokenizer = load_tokenizer(launched.model, settings["trust_remote_code"])
    tokenizer.padding_side = "right"
    attention = model.config._attn_implementation
    causal = settings["task"] == "causal-lm"
    trainer = TRAINERS[settings["task"]](
        model=model,
        args=args,
        train_dataset=open_tokens(tokens / "train"),
        eval_dataset=open_tokens(tokens / "validation"),
        data_collator=RowCollator(tokenizer, attention) if causal else LabelCollator(tokenizer),
        processing_class=tokenizer,
        grouped=grouping(launched.lint["packing"]),
    )
    trainer.remove_callback(PrinterCallback)
    if trainer.is_world_process_zero():
        trainer.add_callback(Progress(launched.output.parent.name, launched.state / LINES))
    return trainer


def grouping(packing: dict) -> int:
    """How far rows are grouped by length: far, where packing was asked for and cannot be."""
    return GROUPED if packing["asked"] and not packing["used"] else 1


def save(trainer: FinetuneTrainer, output: Path) -> None:
    """The adapter or all weights in 16 bit. Every rank gathers, rank 0 writes."""
    if not trainer.is_deepspeed_enabled and isinstance(trainer.model, PreTrainedModel):
        trainer.model.to(compute_dtype())  # full fine-tuning under DDP holds fp32 weights
    aside = aside_of(output)
    if trainer.is_world_process_zero():
        shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed while it saved
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(aside))
    if trainer.is_world_process_zero():
        (aside / "training_args.bin").unlink()  # a pickle; train.json holds the same
        publish(aside, output)
    trainer.accelerator.wait_for_everyone()
