"""Fixtures every test shares: a tiny real model, and a project whose chain has run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from project import make_project, make_tiny_model, snakemake

# Set before any Hugging Face library is imported: no test may ask the hub.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Jobs call `python`: it has to be the one that runs the tests.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


GPU_TESTS = Path(__file__).with_name("gpu")


def pytest_configure(config: pytest.Config) -> None:
    """Only `pytest tests/gpu` sees GPUs. What all other tests assert is true of CPU processes."""
    asked = (Path(argument.split("::")[0]).resolve() for argument in config.args)
    if not all(path.is_relative_to(GPU_TESTS) for path in asked):
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def pytest_runtest_setup() -> None:
    """What the last test spoke for is nothing to this one."""
    from finetune import cli

    cli.speaker = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and a pytest of its own"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with a byte-level tokenizer, saved as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the whole chain ran: 2-process QLoRA under DDP, and ZeRO-3."""
    folder = make_project(tmp_path_factory.mktemp("project"), tiny_model)
    done = snakemake(
        *("--cores", "2", "--resources", "gpu=2", "--configfile", "config.yaml"), cwd=folder
    )
    (folder / "snakemake.out").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
    return folder
