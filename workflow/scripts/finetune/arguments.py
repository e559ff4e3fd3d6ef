"""What the Trainer is told."""

from __future__ import annotations

import torch
from transformers import TrainingArguments

from finetune.batch import split_batch
from finetune.checkpoints import step_of
from finetune.launched import Launched
from finetune.metric_lines import LINES, lacks_validation
from finetune.modeling import compute_dtype
from finetune.tokens import open_tokens

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_8bit"}
"""Names that transformers has for them. The fused one takes a seventh of the time on a CPU."""
SECONDS_AFTER_WATCHDOG = 600
"""Collectives wait longer than the watchdog does: it shows where ranks are, they only end."""


def arguments(launched: Launched) -> TrainingArguments:
    """TrainingArguments. Everything here that is not the user's choice has its reason."""
    settings, plan, micro = launched.settings, launched.planned, launched.micro_batch
    dtype = compute_dtype()
    return TrainingArguments(
        output_dir=str(launched.state),
        use_cpu=not torch.cuda.is_available(),  # else bf16 on a CPU is refused
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=split_batch(plan["global_batch"], micro, launched.world_size),
        max_steps=plan["steps"],
        **optimization(settings, plan),
        activation_checkpointing=plan["gradient_checkpointing"],
        # reentrant checkpointing under DDP marks parameters ready twice (peft issue 313)
        activation_checkpointing_kwargs={"use_reentrant": False},
        ddp_find_unused_parameters=False,
        **validations(launched),
        logging_steps=settings["log_every"],
        logging_nan_inf_filter=False,  # it would print a NaN as 0.0
        save_strategy="no",  # Stopper decides
        remove_unused_columns=False,  # batches carry the row's index for error messages
        seed=settings["seed"],
        data_seed=settings["seed"],
        disable_tqdm=True,
        report_to="none",
        ddp_timeout=int(launched.how["timeout_minutes"] * 60) + SECONDS_AFTER_WATCHDOG,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def optimization(settings: dict, plan: dict) -> dict:
    """The optimizer, and its learning rate over the run."""
    optimizer, schedule = settings["optimizer"], settings["schedule"]
    return {
        "optim": OPTIMIZERS[optimizer["name"]],
        "learning_rate": plan["learning_rate"],
        "weight_decay": optimizer["weight_decay"],
        "adam_beta2": optimizer["beta2"],
        "max_grad_norm": optimizer["max_grad_norm"],
        "lr_scheduler_type": schedule["name"],
        "warmup_steps": schedule["warmup"],  # below 1: a share of the steps
    }


def validations(launched: Launched) -> dict:
    """When the validation split is scored, if there is one: at once where a run that goes on has
    not yet."""
    if not len(open_tokens(launched.tokens / "validation")):
        return {"eval_strategy": "no"}
    every = launched.settings["validate_every"]
    step = step_of(launched.resume) if launched.resume else 0
    lacking = lacks_validation(launched.state / LINES, step, launched.planned, every)
    return {
        "eval_strategy": "steps" if every else "epoch",
        "eval_steps": every,
        "eval_on_start": lacking,
    }
