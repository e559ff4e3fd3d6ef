"""Checks that training is what it claims to be. Each stops a run that would waste its GPUs."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable

import torch
from transformers import TrainerCallback

from finetune.cli import UserError


def check_cuda() -> None:
    """launch.py counts GPUs without starting CUDA (NVML answers where CUDA cannot start), and
    libraries take a CUDA that does not start for none: the ranks would train on the CPU."""
    if os.environ.get("DS_ACCELERATOR") != "cuda" or torch.cuda.is_available():
        return
    reason = "it gives no reason."
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        reason = f"{error}".rstrip(".") + "."
    raise UserError(
        f"this run was given GPU {os.environ.get('CUDA_VISIBLE_DEVICES')} of "
        f"{socket.gethostname()}, and CUDA does not start there: {reason} Compare the driver that "
        "`nvidia-smi` names with the one that the README asks for."
    )


def refuse_data_parallel() -> None:
    """Several visible GPUs without a launcher become nn.DataParallel: slow, and it doubles
    the micro-batch of 4-bit models (transformers pull request 45407)."""
    if torch.cuda.device_count() > 1 and "WORLD_SIZE" not in os.environ:
        raise UserError(
            f"{torch.cuda.device_count()} GPUs are visible and no launcher started this process. "
            "Run `snakemake`, or workflow/scripts/launch.py, or `accelerate launch`."
        )


def check_world_size(found: int, expected: int) -> None:
    """A launcher that starts fewer processes than asked for trains another batch, silently."""
    if found != expected:
        raise UserError(
            f"{found} processes train together, but {expected} were asked for. The launcher "
            "started each alone; check config/accelerate/ and the accelerate version."
        )


class PlacementGuard(TrainerCallback):
    """Just before the first step: where every parameter is, and what is trained."""

    def __init__(self) -> None:
        self.record: dict = {}

    def on_train_begin(self, args, state, control, model=None, **_: object) -> None:
        self.record = placement_record(model, args.device)


def placement_record(model: torch.nn.Module, device: torch.device) -> dict:
    """Devices and trainable counts. Raises UserError when a parameter is on another device.

    ZeRO-3 keeps only shards, possibly in host memory: it is recorded and not compared.
    """
    sharded = any(hasattr(p, "ds_numel") for p in model.parameters())
    devices = sorted({str(p.device) for p in model.parameters()})
    here = "cpu" if device.type == "cpu" else str(device)
    if not sharded and devices != [here]:
        raise UserError(
            f"parameters are on {', '.join(devices)}, but this rank is {device}. Was the model "
            "loaded with a device map of its own?"
        )
    sizes = {n: getattr(p, "ds_numel", p.numel()) for n, p in model.named_parameters()}
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    return {
        "devices": devices,
        "sharded": sharded,
        "trainable_parameters": sum(sizes[n] for n in trained),
        "trainable_tensors": len(trained),
    }


class GradientGuard(TrainerCallback):
    """Fails when a trainable tensor gets no gradient in the first step, or in the first step
    after an evaluation, or when a 4-bit layer hands none on: a detached layer or a broken kernel
    would train as if nothing were.

    Hooks on the tensors see the gradients under DDP and every ZeRO stage alike. They do not see
    a broken 4-bit kernel: adapters beside it still get a gradient, but a wrong one.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.waiting: set[str] = set()
        self.blocking: set[str] = set()
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.checks = 0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.arm()

    def on_evaluate(self, *_: object, **__: object) -> None:
        if self.checks < 2:
            self.arm()

    def arm(self) -> None:
        self.disarm()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self.waiting.add(name)
                self.hooks.append(parameter.register_hook(self.mark(name)))
        for name, module in self.model.named_modules():
            if getattr(module, "quant_state", None) is not None:
                self.hooks.append(module.register_full_backward_hook(self.compare(name)))

    def mark(self, name: str):
        def hook(_: torch.Tensor) -> None:
            self.waiting.discard(name)

        return hook

    def compare(self, name: str):
        def hook(_: torch.nn.Module, handed_on: tuple, received: tuple) -> None:
            if handed_on[0] is not None and received[0].any() and not handed_on[0].any():
                self.blocking.add(name)

        return hook

    def on_step_end(self, *_: object, **__: object) -> None:
        if not self.hooks:
            return
        silent, blocking = sorted(self.waiting), sorted(self.blocking)
        self.disarm()
        self.checks += 1
        if silent:
            raise UserError(
                f"{len(silent)} trainable tensors got no gradient (first: {silent[0]}). They would "
                "stay as they are. Was a layer detached, or its output not used?"
            )
        if blocking:
            raise UserError(
                f"{len(blocking)} 4-bit layers pass no gradient back (first: {blocking[0]}), so "
                "what is before them would learn wrong things. Was their kernel repacked by an "
                "evaluation? Update bitsandbytes, or use `method: lora`."
            )

    def disarm(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.waiting, self.blocking = [], set(), set()


def check_finite(
    value: torch.Tensor | float, what: str, step: int, rows: Callable[[], list[str]]
) -> None:
    """Stop at the first NaN or infinity: the weights after it are worthless. The ids of the rows
    are looked up only then."""
    if not math.isfinite(value):
        raise UserError(
            f"{what} is {float(value)} at step {step}, rows {', '.join(rows())}. Look at these "
            "rows, lower optimizer.learning_rate, or raise schedule.warmup."
        )
