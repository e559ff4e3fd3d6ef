"""torch.compile of a model's layers, one by one: the fusion of the whole, a small part of the wait.

All layers of a kind share one graph (regional compilation), for any length of row. They are
compiled where they are: names of parameters, what is saved, and all that holds or replaces parts
of the model (`head`, `adapter`, DDP) stay as they were.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import torch
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.cli import UserError
from finetune.guards import GradientGuard

GRAPHS = 32
"""That one kind of layer may have: the first layer's input needs no gradient, a batch may have
one row or no padding, and a model may have layers with and without a window."""
WITHOUT = "or leave `compile` out"


class CompiledSteps(TrainerCallback):
    """Compiled layers in training steps alone. Validations are a small part of a run, and would
    need graphs of their own. So would steps in which a guard looks into layers: compiled code does
    not see that its hooks come and go."""

    def __init__(self, model: torch.nn.Module, guard: GradientGuard) -> None:
        compile_layers(model)
        self.guard = guard

    def on_step_begin(self, *_: object, **__: object) -> None:
        torch.compiler.set_stance("force_eager" if self.guard.hooks else "default")

    def on_step_end(self, *_: object, **__: object) -> None:
        torch.compiler.set_stance("force_eager")


def compile_layers(model: torch.nn.Module, backend: str = "inductor") -> None:
    """From now on each layer of `model` compiles itself when it is called."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no layers of transformers' kind that could be compiled; "
            "leave `compile` out."
        )
    # it would cut layers at DDP's buckets, but a layer is no longer than a bucket should be
    torch._dynamo.config.optimize_ddp = False
    # a model's own dropout draws the numbers that it draws without compilation
    options = {"fallback_random": True} if backend == "inductor" else None
    for layer in layers:
        layer.compile(dynamic=True, recompile_limit=GRAPHS, backend=backend, options=options)


def check_compiler(cpu: bool) -> None:
    """Raises UserError where compiled code could not be built, before anything is loaded."""
    if cpu and not cpp_compiler():
        raise UserError(
            "`compile: true` on a CPU needs a C++ compiler, and none was found. Install g++, name "
            f"one in the environment variable CXX, {WITHOUT}."
        )
    if not cpu and not triton():
        raise UserError(
            "`compile: true` needs Triton, a GPU of compute capability 7.0 or more, and a C "
            f"compiler (gcc, clang, or one named in the environment variable CC). Install them, "
            f"{WITHOUT}."
        )
    if not (header := python_header()).exists():
        raise UserError(
            f"`compile: true` needs {header}, and it is not there. Install the headers of this "
            f"Python (python3-dev on Debian and Ubuntu, python3-devel on Fedora), {WITHOUT}."
        )


def python_header() -> Path:
    """What is compiled includes it. `posix_local`, Debian's own scheme, looks beside it."""
    return Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")


def cpp_compiler() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler:
        return None


def triton() -> bool:
    """Triton builds its launchers with the C compiler of the machine (triton/runtime/build.py)."""
    from torch.utils._triton import has_triton

    return has_triton() and bool(
        os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    )
