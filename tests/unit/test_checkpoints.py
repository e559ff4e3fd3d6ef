"""Which checkpoint is gone on from, which are kept, and which are refused."""

import json
from pathlib import Path

import pytest

from finetune import checkpoints
from finetune.checkpoints import check_space
from finetune.cli import UserError
from finetune.facts import check_fits, differences, sub_group_size

FACTS = {
    "settings": {"optimizer": {"learning_rate": 1e-4}, "seed": 0},
    "data_digest": "a",
    "world_size": 2,
    "micro_batch": 4,
}


def make(folder: Path, step: int, sealed: bool = True) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    (checkpoint / "global_step").mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(b"x" * 100)
    (checkpoint / "global_step" / "optimizer.pt").write_bytes(b"y" * 10)
    if sealed:
        checkpoints.seal(checkpoint, FACTS)
    return checkpoint


def test_the_newest_by_number_and_not_by_name(tmp_path):
    for step in (90, 100, 9):
        make(tmp_path, step)
    assert checkpoints.newest(tmp_path) == (tmp_path / "checkpoint-100", [])
    assert checkpoints.newest(tmp_path / "nowhere") == (None, [])


def break_manifest(checkpoint):
    (checkpoint / "checkpoint.json").write_text('{"step": 3')


def no_manifest(checkpoint):
    (checkpoint / "checkpoint.json").unlink()


def no_file(checkpoint):
    (checkpoint / "global_step" / "optimizer.pt").unlink()


def short_file(checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"x" * 99)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (no_manifest, "it has no checkpoint.json: saving did not end"),
        (break_manifest, "its checkpoint.json is broken"),
        (no_file, "global_step/optimizer.pt is missing"),
        (short_file, "model.safetensors has 99 bytes instead of 100"),
    ],
)
def test_a_broken_one_is_passed_over_by_name_and_reason(tmp_path, harm, reason):
    make(tmp_path, 2)
    harm(make(tmp_path, 3))
    found, skipped = checkpoints.newest(tmp_path)
    assert found == tmp_path / "checkpoint-2"
    assert skipped == [f"checkpoint-3 is not used: {reason}"]


def test_rotation_keeps_the_newest_two_that_are_whole(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    make(tmp_path, 4, sealed=False)
    checkpoints.rotate(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]


def test_rotation_never_takes_the_last_whole_one(tmp_path):
    make(tmp_path, 1)
    for step in (2, 3, 4):
        make(tmp_path, step, sealed=False)
    checkpoints.rotate(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_what_changed_is_named(tmp_path):
    now = FACTS | {"settings": {"optimizer": {"learning_rate": 2e-4}, "seed": 0}}
    now |= {"data_digest": "b"}
    assert differences(FACTS, now) == [
        "the data is another",
        "optimizer.learning_rate 0.0001 -> 0.0002",
    ]
    with pytest.raises(UserError, match="Undo the change to go on from there, or start from the"):
        check_fits(tmp_path / "checkpoint-1", FACTS, now, sharded=False)


def test_the_split_of_the_batch_may_change_but_not_the_number_of_shards(tmp_path):
    now = FACTS | {"world_size": 4, "micro_batch": 1}
    check_fits(tmp_path / "checkpoint-1", FACTS, now, sharded=False)
    check_fits(tmp_path / "checkpoint-1", FACTS, FACTS | {"micro_batch": 1}, sharded=True)
    with pytest.raises(UserError, match="made by 2 processes and there are now 4"):
        check_fits(tmp_path / "checkpoint-1", FACTS, now, sharded=True)


def test_the_optimizer_of_a_checkpoint_is_split_as_the_launch_files_say(tmp_path):
    """DeepSpeed would copy tensors of one size into those of another."""
    assert [sub_group_size(launch) for launch in ("ddp", "zero2")] == [None, None]
    assert sub_group_size("zero3") == sub_group_size("zero3-offload") == 20_000_000
    before = FACTS | {"sub_group_size": 1_000_000_000}
    with pytest.raises(UserError, match=r"other settings: sub_group_size 1000000000 -> 20000000"):
        check_fits(tmp_path / "checkpoint-1", before, FACTS | {"sub_group_size": 20_000_000}, True)


DISK = {"checkpoint": 12_020_000_000, "trained": 2_020_000_000, "train": 38_080_000_000}


def test_a_disk_too_small_is_an_error_before_training(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": DISK["train"]})
    monkeypatch.setattr("finetune.checkpoints.shutil.disk_usage", lambda _: usage)
    check_space(tmp_path, DISK)
    usage.free = DISK["train"] - 150
    with pytest.raises(UserError, match=r"needs 38\.08 GB more .* its disk has 38\.08 free"):
        check_space(tmp_path, DISK)
    make(tmp_path, 1)  # what is there already need not be written
    check_space(tmp_path, DISK)


def test_a_manifest_names_every_file(tmp_path):
    manifest = json.loads((make(tmp_path, 7) / "checkpoint.json").read_text())
    assert manifest["files"] == {"global_step/optimizer.pt": 10, "model.safetensors": 100}
    assert (manifest["step"], manifest["facts"]) == (7, FACTS)
