"""Checkpoints that a kill or a full disk cut short are not used; whole ones are not lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.files import read_json
from survival import EVERY_STEP, STEPS, Job

KILL_IN_SAVE = """
from finetune import checkpoints
def kill(folder, facts):
    if folder.name == "checkpoint-4":
        os.kill(int(os.environ["LAUNCHER"]), 9)
        time.sleep(60)
    seal(folder, facts)
if step == 1:
    seal, checkpoints.seal = checkpoints.seal, kill
    globals()["seal"] = seal
os.environ["LAUNCHER"] = str(__import__("psutil").Process(os.getppid()).ppid())
"""
FULL_DISK = """
import resource
if (rank, step) == (0, 5):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
"""


def test_what_a_kill_or_a_full_disk_cut_short_is_not_used(
    finished: Path, tmp_path: Path, undisturbed
) -> None:
    job = Job(finished, tmp_path).with_settings(**EVERY_STEP)
    assert job.finish(fault=KILL_IN_SAVE) == -9
    assert job.checkpoints() == [2, 3, 4]
    assert job.finish(fault=FULL_DISK) == 1
    said = job.said()
    assert "checkpoint-4 is not used: it has no checkpoint.json: saving did not end" in said
    assert ", 3 of them done" in said
    assert "checkpoint-5 could not be written: " in said
    assert said.count("ERROR") == 1
    job.plan["settings"]["checkpoint_minutes"] = 15
    assert job.finish() == 0, job.log.read_text()[-3000:]
    assert "checkpoint-5 is not used" in job.said()
    assert ", 4 of them done" in job.said()
    assert job.losses() == undisturbed("tiny-qlora").losses()
    assert job.weights() == undisturbed("tiny-qlora").weights()
    assert job.events() == ["started", "killed", "resumed", "failed", "resumed"]


def test_a_checkpoint_of_other_settings_or_processes_is_refused_with_the_choices(
    finished: Path, tmp_path: Path
) -> None:
    job = Job(finished, tmp_path, "tiny-full").with_settings(**EVERY_STEP)
    assert job.finish(fault="if step == 3: raise KeyError") == 1
    assert job.checkpoints() == [1, 2]
    job.settings["optimizer"]["learning_rate"] = 5e-4
    assert job.finish() == 1
    assert "was made with other settings: optimizer.learning_rate 0.001 -> 0.0005." in job.said()
    assert "Undo the change to go on from there, or start from the beginning: rm -r" in job.said()
    job.settings["optimizer"]["learning_rate"] = 1e-3
    assert job.finish(gpus=1) == 1
    assert "was made by 2 processes and there are now 1: ZeRO" in job.said()
    assert "Set `gpus: 2`. Run your command again with `--resources gpu=2`, or start" in job.said()
    assert job.checkpoints() == [1, 2]
    sizes = read_json(job.state / "checkpoint-2" / "checkpoint.json")["files"]
    (job.state / "checkpoint-2" / max(sizes, key=sizes.get)).write_bytes(b"short")
    assert job.finish() == 0
    assert "has 5 bytes instead of" in job.said()
    assert ", 1 of them done" in job.said()
    assert job.record()["steps"] == STEPS


@pytest.mark.slow
def test_another_number_of_processes_goes_on_under_ddp(
    finished: Path, tmp_path: Path, undisturbed
) -> None:
    """The rows of each step are the same; dropout is not."""
    job = Job(finished, tmp_path).with_settings(**EVERY_STEP)
    assert job.finish(fault="if step == 4: raise KeyError") == 1
    assert job.finish(gpus=1) == 0, job.log.read_text()[-3000:]
    assert ", 3 of them done" in job.said()
    assert job.record()["tokens"] == undisturbed("tiny-qlora").record()["tokens"]
