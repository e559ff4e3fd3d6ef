"""What a run cannot start with, said before a GPU is asked for.

Each check raises UserError, with what to change.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path

from finetune.checks import failed_checks
from finetune.cli import UserError, run_again, say
from finetune.devices import GB, Device, find_device
from finetune.shapes import Shapes

GENERATED = 1.1
"""Times the weights that evaluation loads: the cache and logits of a small batch. Those of a larger
one shrink with `evaluation.batch_size`, and the weights do not."""


def check_task(task: str, lint: dict) -> None:
    """The task and the data must be made for each other."""
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


def check_data(lint: dict, checks: dict, page: Path) -> None:
    """Data that fails a check of its dataset is not trained on."""
    if failed := failed_checks(lint, checks):
        raise UserError(f"the data check failed (see {page}): {' '.join(failed)}")


def check_rows(size: int, rows: int) -> None:
    if rows < size:
        raise UserError(f"{rows} training rows do not fill one batch; set batch.global <= {rows}.")


def check_context(context: int | None, longest: int) -> None:
    if context is not None and longest > context:
        raise UserError(
            f"the longest row has {longest} tokens, but the model's context is {context}; set "
            "max_length under the dataset to at most that."
        )


def check_attention(settings: dict, lint: dict, pretrained: Path) -> None:
    """Where the GPUs are told and not seen, another machine trains: then launch.py asks whether the
    package is there."""
    if settings["attention"] == "flash_attention_2" and lint["packing"]["used"]:
        from finetune.varlen import check_chosen  # it imports the models of transformers

        check_chosen(pretrained, settings["trust_remote_code"])
    if not (settings["gpu_memory_gb"] or settings["gpu_model"]):
        check_installed(settings["attention"])


def check_installed(attention: str | None) -> None:
    """On the machine that trains. What transformers would say when a model is loaded, on GPUs that
    were waited for; where it has `kernels`, it takes one of those instead."""
    if attention != "flash_attention_2":
        return
    from transformers.utils import is_flash_attn_greater_or_equal, is_kernels_available

    if not (is_flash_attn_greater_or_equal("2.3.3") or is_kernels_available()):
        raise UserError(
            "`attention: flash_attention_2` needs a GPU and the package flash-attn (2.3.3 or "
            "newer), which is not installed here: `pip install flash-attn`, or leave `attention` "
            "out under the model."
        )


def check_compile(settings: dict) -> None:
    """Where the plan is for a GPU, the machine that has it may have another compiler, or none: then
    train.py asks."""
    if settings["compile"] and find_device(settings).cpu:
        from finetune.compiling import check_compiler  # it imports torch's

        check_compiler(cpu=True)


def check_adapters(lora: dict | None, shapes: Shapes) -> None:
    """What peft would refuse, or find nowhere, when the model is loaded."""
    targets = lora["target_modules"] if lora else []
    if lora and lora["dropout"] and targets == "all-linear" and shapes.expert_adapters:
        raise UserError(
            "this model has experts in one tensor, and peft adapts such only without dropout: set "
            "`lora: {dropout: 0}`, or name the layers in lora.target_modules."
        )
    names = sorted({layer.name for layer in shapes.linear})
    if unknown := [t for t in targets if isinstance(targets, list) and t not in names]:
        raise UserError(
            f"lora.target_modules {', '.join(unknown)}: no such linear layer in this model; it "
            f"has {', '.join(names)}."
        )


def check_evaluation(settings: dict, shapes: Shapes, device: Device) -> None:
    """A model is evaluated whole and in 16 bit, however it was trained. Raises UserError, with
    what to set, where `evaluation.gpus` do not hold it."""
    gpus, needed = settings["evaluation"]["gpus"], shapes.parameters * 2 * GENERATED
    if device.cpu or needed <= gpus * device.available:
        return
    text = (
        "the trained model could not be evaluated: 16-bit weights, and a tenth for what is "
        f"generated, take {needed / GB:.1f} GB, and `evaluation: {{gpus: {gpus}}}` gives it {gpus} "
        f"x {device.available / GB:.1f} GB ({device.name}). "
    )
    if settings["allow_oversubscription"]:
        say(f"WARNING: {text}It is started all the same: allow_oversubscription.")
        return
    raise UserError(
        f"{text}Set `evaluation: {{gpus: {ceil(needed / device.available)}}}` under the dataset. "
        "Or, to train and merge alone, set `allow_oversubscription: true` for the run. "
        f"{run_again('--until merge')}."
    )
