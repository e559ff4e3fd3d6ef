"""evaluate_model.py takes the GPUs that it was granted, together, or says why it cannot."""

import os
import sys

import pytest

import evaluate_model
from finetune import leases
from finetune.cli import UserError


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(GPUs granted, devices): what CUDA would see while a model is evaluated."""
    seen = []

    def look(_):
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))

    monkeypatch.setattr(evaluate_model, "check_complete", lambda _: None)
    monkeypatch.setattr(evaluate_model, "evaluate_model", look)
    monkeypatch.setattr(leases, "FOLDER", tmp_path / "leases")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as it was")

    def run(granted, devices):
        monkeypatch.setattr(evaluate_model, "visible_devices", lambda: devices)
        argv = ["evaluate_model.py", "--settings", "{}", "--gpus", str(granted)]
        for name in ("model", "data", "tokens", "lint", "metrics", "predictions"):
            argv += [f"--{name}", name]
        monkeypatch.setattr(sys, "argv", argv)
        evaluate_model.main()
        return seen.pop()

    return run


@pytest.mark.parametrize(
    ("granted", "devices", "expected"),
    [
        (1, ["0", "1", "2"], "0"),
        (2, ["0", "1", "2"], "0,1"),
        (2, [], ""),  # CPU
        (0, [], ""),
    ],
)
def test_granted_devices_are_taken_together(run, granted, devices, expected):
    assert run(granted, devices) == expected


def test_none_is_taken_where_none_was_granted(run):
    """`--resources gpu=0` on a machine that has some: train refuses it too."""
    with pytest.raises(UserError, match=r"^no GPU was granted\. Run your command again with"):
        run(0, ["0", "1"])


def test_more_than_are_visible_are_refused_and_not_waited_for(run):
    with pytest.raises(UserError, match=r"evaluation\.gpus asks for 2 GPUs and 1 are visible"):
        run(2, ["0"])
