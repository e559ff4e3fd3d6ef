"""Guards that stop a run which would not be what it claims."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from finetune.files import read_json

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"


def train_options(finished: Path, folder: Path, world_size: int) -> list[str]:
    base = finished / "results"
    run = base / "runs/tiny-qlora"
    return [
        *("--config", str(run / "train.yaml"), "--plan", str(run / "plan.json")),
        *("--tokens", str(base / "tokens/lights/tiny")),
        *("--model", str(base / "models/tiny/pretrained")),
        *("--output", str(folder / "trained"), "--metrics", str(folder / "metrics.jsonl")),
        *("--record", str(folder / "train.json"), "--state", str(folder / "checkpoints")),
        *("--world-size", str(world_size), "--micro-batch", "1"),
    ]


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_a_launcher_that_starts_one_process_is_found_out(finished: Path, tmp_path: Path) -> None:
    """`use_cpu: true` makes accelerate start one process, whatever --num_processes says."""
    wrong = tmp_path / "cpu.yaml"
    wrong.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\n"
    )
    done = run(
        *("-m", "accelerate.commands.launch", "--config_file", str(wrong), "--num_processes", "2"),
        *("--num_machines", "1", str(SCRIPTS / "train.py")),
        *train_options(finished, tmp_path, world_size=2),
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "1 processes train together, but 2 were asked for" in done.stdout
    assert not (tmp_path / "trained").exists()


BROKEN = """
import train
from finetune import training
from finetune.cli import run_script

load = training.load_for_training

def cut(*args):
    model = load(*args)
    layer = model.get_base_model().model.layers[0].mlp
    layer.register_forward_hook(lambda module, inputs, output: output.detach())
    return model

training.load_for_training = cut
run_script(train.main)
"""


def test_a_tensor_without_a_gradient_stops_the_run(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "train_broken.py").write_text(BROKEN)
    ddp = SCRIPTS.parents[1] / "config/accelerate/ddp.yaml"
    done = run(
        *("-m", "accelerate.commands.launch", "--config_file", str(ddp), "--num_processes", "2"),
        *("--main_process_port", "0", str(tmp_path / "train_broken.py")),
        *train_options(finished, tmp_path, world_size=2),
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "6 trainable tensors got no gradient (first: base_model" in done.stdout
    assert "layers.0.mlp.down_proj" in done.stdout
    assert not (tmp_path / "trained").exists()


def test_gradients_survive_evaluations_in_training(finished: Path) -> None:
    """Validation ran after step 2; bitsandbytes would have dropped gradients from step 3 on.
    The guard checks step 3, so a finished run means that all tensors had theirs."""
    record = read_json(finished / "results/runs/tiny-qlora/train.json")
    assert record["gradient_checks"] == 2
