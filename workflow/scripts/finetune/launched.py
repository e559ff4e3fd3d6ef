"""What launch.py tells each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from finetune.files import read_json


@dataclass(frozen=True)
class Launched:
    """Options of train.py, and what the files say that they name."""

    config: Path
    plan: Path
    tokens: Path
    model: Path
    output: Path
    metrics: Path
    record: Path
    state: Path
    world_size: int
    micro_batch: int
    resume: Path | None

    @cached_property
    def settings(self) -> dict:
        """By which the run is known: train.yaml."""
        return yaml.safe_load(self.config.read_text())

    @cached_property
    def planned(self) -> dict:
        return read_json(self.plan)

    @property
    def how(self) -> dict:
        """The settings with the keys that change no result, which train.yaml lacks."""
        return self.planned["settings"]

    @cached_property
    def lint(self) -> dict:
        return read_json(self.tokens / "lint.json")
