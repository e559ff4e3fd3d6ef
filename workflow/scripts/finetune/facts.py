"""What a checkpoint was made with, and whether it fits what a run is now.

launch.py writes the facts beside the checkpoints before it starts the ranks, since to digest the
data takes a while; each checkpoint then carries them, and train.json takes the digests from them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune.cli import UserError, run_again
from finetune.files import digest_json, read_json
from finetune.memory import zero_section

FACTS = "facts.json"
OPEN = {"world_size", "micro_batch", "validation_digest"}
"""How the batch is split: rows of a step and their order stay the same. And what is only scored."""


def facts_of(settings: dict, plan: dict, tokens: Path, model: Path, world_size: int) -> dict:
    """Of a launch. Each of its attempts adds its `micro_batch`."""
    from finetune.tokens import digest_tokens  # it imports `datasets`

    return {
        "settings": settings,
        "sub_group_size": sub_group_size(settings["launch"]),
        "world_size": world_size,
        "steps": plan["steps"],
        "learning_rate": plan["learning_rate"],
        "data_digest": digest_tokens(tokens / "train"),
        "validation_digest": digest_tokens(tokens / "validation"),
        "model_digest": digest_json(read_json(model.parent / "model.json")["files"]),
    }


def sub_group_size(launch: str) -> int | None:
    """Parameters whose optimizer state ZeRO-3 has in one tensor, of its memory as of a checkpoint
    (config/deepspeed)."""
    return None if launch == "ddp" else zero_section(launch).get("sub_group_size")


def read_facts(folder: Path) -> dict:
    """Empty where launch.py did not start this: such checkpoints fit nothing."""
    return read_json(folder / FACTS) if (folder / FACTS).exists() else {}


def check_fits(checkpoint: Path, then: dict, now: dict, sharded: bool) -> None:
    """Refuse to go on with another data set, model or settings, or under ZeRO with another
    number of processes, than the checkpoint was made with."""
    again = f"start from the beginning: rm -r {checkpoint.parent}"
    if changes := differences(then, now):
        raise UserError(
            f"{checkpoint} was made with other settings: {'; '.join(changes)}. Undo the change to "
            f"go on from there, or {again}"
        )
    before, granted = then["world_size"], now["world_size"]
    if sharded and before != granted:
        raise UserError(
            f"{checkpoint} was made by {before} processes and there are now {granted}: ZeRO splits "
            f"the optimizer over a fixed number. Set `gpus: {before}`. "
            f"{run_again(f'--resources gpu={before}')}, or {again}"
        )


def differences(then: dict, now: dict) -> list[str]:
    """What to read of each fact that differs, key by key."""
    before, after = (flat({k: v for k, v in one.items() if k not in OPEN}) for one in (then, now))
    keys = sorted(key for key in before | after if before.get(key) != after.get(key))
    return [
        describe(key.removeprefix("settings."), before.get(key), after.get(key)) for key in keys
    ]


def describe(key: str, before: Any, after: Any) -> str:
    if key.endswith("_digest"):
        return f"the {key.removesuffix('_digest')} is another"
    return f"{key} {json.dumps(before)} -> {json.dumps(after)}"


def flat(nested: dict, inside: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            found |= flat(value, f"{inside}{name}.")
        else:
            found[f"{inside}{name}"] = value
    return found
