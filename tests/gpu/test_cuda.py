"""What only a GPU shows: placement by local rank, NF4 kernels, bf16, ZeRO-3 over NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.files import read_json
from project import make_project, snakemake

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus() -> int:
    import torch

    return min(2, torch.cuda.device_count())


@pytest.fixture(scope="module")
def trained(gpus: int, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole chain on one or two GPUs."""
    defaults = {"gpus": gpus, "batch": {"global": 4, "micro": 1}}
    project = make_project(tmp_path_factory.mktemp("gpu"), tiny_model, defaults=defaults)
    done = snakemake(
        *("--cores", "all", "--resources", f"gpu={gpus}", "--configfile", "config.yaml"),
        cwd=project,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return project


def record(project: Path, run: str) -> dict:
    return read_json(project / f"results/runs/{run}/train.json")


def test_qlora_is_pinned_to_its_gpu(trained: Path, gpus: int) -> None:
    facts = record(trained, "tiny-qlora")
    assert facts["world_size"] == gpus
    assert facts["placement"]["devices"] == ["cuda:0"]  # rank 0 writes the record
    assert facts["backend"] == "nccl"
    assert facts["peak_memory"]["gpu"] > 0
    assert facts["gradient_checks"] == 2


def test_precision_follows_the_device(trained: Path) -> None:
    import torch

    native = torch.cuda.is_bf16_supported(including_emulation=False)
    assert record(trained, "tiny-full")["precision"] == ("bfloat16" if native else "float16")


def test_zero3_runs_over_nccl_and_saves_whole_weights(trained: Path, gpus: int) -> None:
    facts = record(trained, "tiny-full")
    assert (facts["world_size"], facts["placement"]["sharded"]) == (gpus, True)
    assert facts["backend"] == "nccl"
    merged = read_json(trained / "results/runs/tiny-full/merge.json")
    assert (
        merged["parameters"] == read_json(trained / "results/models/tiny/model.json")["parameters"]
    )


PINNED = """
import os, sys
from pathlib import Path
import torch
from transformers import TrainingArguments
from finetune.modeling import load_for_training
args = TrainingArguments(output_dir="/tmp/pinned", report_to="none")
settings = {
    "method": "qlora", "launch": "ddp", "attention": None, "trust_remote_code": False,
    "quantization": {"type": "nf4", "double": True},
    "lora": {"rank": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"},
}
model = load_for_training(Path(sys.argv[1]), settings, args.local_process_index)
devices = {str(p.device) for p in model.parameters()}
assert devices == {f"cuda:{os.environ['LOCAL_RANK']}"}, devices
"""


def test_each_rank_loads_on_the_device_of_its_local_rank(
    gpus: int, tiny_model: Path, tmp_path: Path
) -> None:
    if gpus < 2:
        pytest.skip("needs two CUDA devices")
    (tmp_path / "pinned.py").write_text(PINNED)
    scripts = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *(str(tmp_path / "pinned.py"), str(tiny_model)),
        ],
        env=os.environ | {"PYTHONPATH": str(scripts)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_nf4_forward_matches_the_16_bit_model(tiny_model: Path) -> None:
    """4-bit weights are close to 16-bit ones, and finite, on the CUDA kernels."""
    import torch

    from finetune.modeling import load_for_inference

    ids = torch.tensor([[1, 40, 41, 42]], device="cuda")
    exact = load_for_inference(tiny_model, False, device="cuda:0")(ids).logits.float()
    nf4 = {"type": "nf4", "double": True}
    rounded = load_for_inference(tiny_model, False, nf4, device="cuda:0")(ids).logits.float()
    assert torch.isfinite(rounded).all()
    similarity = torch.nn.functional.cosine_similarity(exact, rounded, dim=-1)
    assert similarity.min() > 0.95
