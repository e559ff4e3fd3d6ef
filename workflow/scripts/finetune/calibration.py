"""What finished runs teach about the next: `results/calibration.jsonl`, a line for each.

A prediction is multiplied by the median of measured / predicted over earlier runs of its kind: one
odd run among several does not move it. Of the kinds below, the nearest that has any run is taken.
The file is an input of no rule: a new line makes nothing again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError

if TYPE_CHECKING:
    from finetune.memory import Job

KINDS = (
    ("on", "device", "method", "launch", "gradient_checkpointing", "model"),
    ("on", "device", "method", "launch", "gradient_checkpointing"),
    ("on", "device", "method", "launch"),
    ("on", "method", "launch"),
)
"""What runs have in common, nearest first."""
SPEED_KINDS = (KINDS[0], ("on", "method", "launch", "model"))
"""The speed of another model differs by far more than its size."""
Of = Literal["process", "node"]
"""Of one process, on its GPU where it has one; or of all of them, on the host."""
Bytes = dict[Of, PositiveInt | None]


class Finished(BaseModel, allow_inf_nan=False):
    """A line of the file."""

    run: str
    settings_digest: str
    model: str
    device: str
    """Name of the GPU, or CPU."""
    method: str
    launch: str
    gradient_checkpointing: bool
    world_size: PositiveInt
    micro_batch: PositiveInt
    """That was planned. A run that ran out of memory ended with less, but counts at its worst."""
    length: PositiveInt
    """Tokens of the longest row."""
    predicted: Bytes
    """None where the plan was about another number of processes, or a GPU that was not there."""
    measured: Bytes
    tokens_per_second: PositiveFloat
    """Over all processes."""
    training_seconds: PositiveFloat
    other_seconds: float = Field(ge=0)
    """Loading, validation and saving, over all launches."""

    @property
    def on(self) -> str:
        return "cpu" if self.device == "CPU" else "gpu"


@dataclass(frozen=True)
class Ratio:
    """Measured / predicted over runs of a kind."""

    median: float
    low: float
    high: float
    runs: int
    alike: tuple[str, ...]
    """What these runs have in common with the one that is planned."""

    def __str__(self) -> str:
        runs = "an earlier run" if self.runs == 1 else f"{self.runs} earlier runs"
        spread = f"{self.low:.2f} to {self.high:.2f}"
        return f"{runs} of its kind took {self.median:.2f} times what was predicted ({spread})"


@dataclass(frozen=True)
class EarlierRuns:
    """Earlier runs, seen from where a new one is planned. What is not known of that, as the device
    is not on a host without one, does not tell runs apart."""

    lines: Sequence[Finished] = ()
    model: str | None = None
    device: str | None = None
    """As in a line."""
    on: Literal["gpu", "cpu"] | None = None
    ratios: dict[tuple, Ratio | None] = field(default_factory=dict)
    """Found already: a plan asks for each of very many batches."""

    def ratio(self, job: Job, of: Of) -> Ratio | None:
        """None: uncalibrated, no run of the kind has both numbers."""
        wanted = self.wanted(job)
        key = (of, *wanted.values())
        if key not in self.ratios:
            self.ratios[key] = memory_ratio(self.lines, wanted, of)
        return self.ratios[key]

    def correction(self, job: Job, of: Of, raw: int) -> dict | None:
        """For plan.json: the ratio, and the bytes that it makes of those predicted."""
        ratio = self.ratio(job, of)
        return ratio and asdict(ratio) | {"corrected": round(raw * ratio.median)}

    def time(self, job: Job, tokens: int) -> dict | None:
        found = expected_seconds(self.lines, self.wanted(job), tokens, job.world)
        return found and {"tokens": tokens} | found

    def wanted(self, job: Job) -> dict:
        here = {"model": self.model, "device": self.device, "on": self.on}
        how = {"method": job.method, "launch": job.launch}
        return here | how | {"gradient_checkpointing": job.checkpointing}


def finished(record: dict, plan: dict, longest: int) -> Finished:
    """The line of a run, from its train.json and plan.json."""
    memory, settings = record["memory"], record["settings"]
    on_cpu = record["device"] == "CPU"
    as_planned = on_cpu == plan["memory"]["cpu"]
    as_planned &= record["world_size"] == plan["world_size"]
    return Finished(
        run=record["run"],
        settings_digest=record["settings_digest"],
        model=record["model_name"],
        device=record["device"],
        method=settings["method"],
        launch=settings["launch"],
        gradient_checkpointing=plan["gradient_checkpointing"],
        world_size=record["world_size"],
        micro_batch=plan["micro_batch"],
        length=longest,
        predicted={kind: memory[kind]["predicted"] if as_planned else None for kind in memory},
        measured={kind: memory[kind]["measured"] for kind in memory},
        tokens_per_second=record["tokens_per_second"],
        training_seconds=record["training_seconds"],
        other_seconds=max(0, record["wall_seconds"] - record["training_seconds"]),
    )


def append(path: Path, line: Finished) -> None:
    """One write to the end, which other runs cannot come between on a local disk. Where it does go
    wrong, as on a network disk or in a crash, a damaged line is skipped by the reader."""
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    text = ("\n" if torn else "") + line.model_dump_json() + "\n"
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o666)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def read(path: Path) -> tuple[list[Finished], int]:
    """The lines, and how many were damaged. A run with the same settings counts as it was last."""
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    lines: dict[tuple[str, str], Finished] = {}
    damaged = 0
    for text in filter(str.strip, texts):
        try:
            line = Finished.model_validate_json(text)
        except ValidationError:
            damaged += 1
        else:
            lines[line.run, line.settings_digest] = line
    return list(lines.values()), damaged


def alike(
    lines: Sequence[Finished], wanted: dict, kinds: tuple[tuple[str, ...], ...]
) -> tuple[list[Finished], tuple[str, ...]]:
    """Runs of the nearest kind that has any, and what is known of `wanted` that they share."""
    for kind in kinds:
        known = tuple(key for key in kind if wanted[key] is not None)
        found = [one for one in lines if all(getattr(one, k) == wanted[k] for k in known)]
        if found:
            return found, known
    return [], ()


def memory_ratio(lines: Sequence[Finished], wanted: dict, memory: Of) -> Ratio | None:
    usable = [one for one in lines if one.predicted.get(memory) and one.measured.get(memory)]
    found, common = alike(usable, wanted, KINDS)
    if not found:
        return None
    ratios = [one.measured[memory] / one.predicted[memory] for one in found]
    return Ratio(median(ratios), min(ratios), max(ratios), len(ratios), common)


def expected_seconds(
    lines: Sequence[Finished], wanted: dict, tokens: int, processes: int
) -> dict | None:
    """How long training will take: the tokens at the median speed of a process of such runs, and
    the median of what they spent on loading, validation and saving. None without such runs."""
    found, _ = alike(lines, wanted, SPEED_KINDS)
    if not found:
        return None
    speed = processes * median(one.tokens_per_second / one.world_size for one in found)
    other = median(one.other_seconds for one in found)
    return {
        "tokens_per_second": speed,
        "other_seconds": other,
        "seconds": tokens / speed + other,
        "runs": len(found),
    }
