"""Which devices a job sees, through what the command of every rule begins with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from project import ROOT, make_project

SNAKEFILE = """
include: "workflow/rules/common.smk"


rule devices:
    output:
        "devices.txt",
    shell:
        "PYTHONPATH=$SCRIPTS python two_gpus.py > {output}"
"""
TWO_GPUS = """
import os
import torch
from finetune.leases import visible_devices
torch.cuda.device_count = lambda: 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else 2
print(*visible_devices())
"""


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        ({}, "0 1"),
        ({"CUDA_VISIBLE_DEVICES": "3,5"}, "3 5"),
        ({"DS_ACCELERATOR": "cpu"}, ""),
        ({"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "3,5"}, ""),  # as SLURM names them
    ],
)
def test_a_job_sees_its_gpus_unless_the_user_wants_the_cpu(
    given: dict[str, str], devices: str, tiny_model: Path, tmp_path: Path
) -> None:
    make_project(tmp_path, tiny_model)
    (tmp_path / "workflow").symlink_to(ROOT / "workflow")
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    (tmp_path / "two_gpus.py").write_text(TWO_GPUS)
    hidden = ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")
    env = {name: value for name, value in os.environ.items() if name not in hidden} | given
    command = [sys.executable, "-m", "snakemake", "--configfile", "config.yaml", "--cores", "1"]
    done = subprocess.run(
        [*command, "devices"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "devices.txt").read_text().strip() == devices
