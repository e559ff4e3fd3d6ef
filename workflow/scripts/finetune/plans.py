"""plan.json, as those read it who come after the plan."""

from __future__ import annotations

from pathlib import Path

from finetune.files import read_json


def read_plan(path: str | Path) -> dict:
    """With what one of older code lacks: a run that was planned before an update goes on after it.
    There checkpointing was always set, all was one node, nothing was compiled, and disk space was
    not planned."""
    plan = read_json(path)
    if "gradient_checkpointing" not in plan:
        plan["gradient_checkpointing"] = plan["settings"]["gradient_checkpointing"]
    plan["settings"] = {"nodes": 1, "compile": False} | plan["settings"]
    plan["memory"] = {"disk": None, "host": {}, "calibration": {}} | plan["memory"]
    return plan
