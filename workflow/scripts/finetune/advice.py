"""What to change when memory does not suffice: tried, not guessed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import get_args

from finetune.calibration import EarlierRuns
from finetune.config import Launch, Method, why_refused
from finetune.devices import GB, Device
from finetune.fitting import Auto, fitted
from finetune.memory import Job, predicted, training_memory
from finetune.shapes import Shapes

METHODS = get_args(Method)
"""Each takes more memory than the one before."""
BY_SHARING = get_args(Launch)
"""Each shares out more than the one before."""
MOST_GPUS = 64
SHORTEST = 0.5
"""Of the longest row: what is cut further is another data set."""
GRAIN = 64
"""Tokens by which max_length is shortened."""


@dataclass(frozen=True)
class Request:
    """What is fixed for a run (model, device, global batch), and what the settings fix of the rest:
    "auto" is for `best` to choose."""

    shapes: Shapes
    device: Device
    global_batch: int
    micro: int | Auto = "auto"
    recompute: bool | Auto = "auto"
    earlier: EarlierRuns = field(default_factory=EarlierRuns)

    def best(self, job: Job) -> Job:
        room = self.room(job).available
        return fitted(job, self.needs, room, self.global_batch, self.micro, self.recompute)

    def needs(self, job: Job) -> int:
        """Bytes of one process: predicted, and corrected by earlier runs of its kind."""
        ratio = self.earlier.ratio(job, "process")
        return round(self.predicts(job) * (ratio.median if ratio else 1))

    def predicts(self, job: Job) -> int:
        """The same from shapes alone."""
        return predicted(training_memory(self.shapes, job))

    def room(self, job: Job) -> Device:
        """CPU processes share a machine: the more there are, the less has each."""
        if not self.device.cpu:
            return self.device
        return replace(self.device, available=self.device.available / job.per_node)

    def fits(self, job: Job) -> bool:
        return self.needs(job) <= self.room(job).available


def refusal(request: Request, job: Job) -> str:
    """Why a run cannot start, and the smallest change with which it can."""
    parts, room = training_memory(request.shapes, job), request.room(job)
    largest = max(parts, key=parts.get)
    where = "process" if room.cpu else "GPU"
    text = (
        f"needs about {request.needs(job) / GB:.1f} GB on each {where}, but each has "
        f"{room.available / GB:.1f} ({room.name}). {correction(request, job)}The largest part is "
        f"{largest} ({parts[largest] / GB:.1f} GB). "
    )
    change = smallest_change(request, job)
    text += f"The smallest change that fits: {change}." if change else "No single change fits."
    if room.cpu:
        text += " If it is to run on GPUs, say which: `gpu_model: h100`, or `gpu_memory_gb`."
    return text


def correction(request: Request, job: Job) -> str:
    """What earlier runs have to do with it."""
    ratio = request.earlier.ratio(job, "process")
    said = (
        f"From shapes alone it would be {request.predicts(job) / GB:.1f} GB; {ratio} "
        "(results/calibration.jsonl). "
    )
    return said if ratio else ""


def smallest_change(request: Request, job: Job) -> str | None:
    """The first of `changes` with which the job fits."""
    return next((text for text, changed in changes(request, job) if request.fits(changed)), None)


def changes(request: Request, job: Job) -> Iterator[tuple[str, Job]]:
    """What could be changed, the least painful first. The first two leave the result as it is, so
    all the others come on top of them."""
    said = []
    if job.micro > 1:
        job, said = replace(job, micro=1), ["`batch: {micro: 1}`"]
        yield said[0], job
    if not job.checkpointing:
        job, said = replace(job, checkpointing=True), [*said, "`gradient_checkpointing: true`"]
        yield " and ".join(said), job
    if length := shorter(request, job):
        yield " and ".join([*said, f"`max_length: {length}`"]), replace(job, length=length)
    for change, changed in others(request, job):
        yield " and ".join([*said, change]), changed


def shorter(request: Request, job: Job) -> int | None:
    """The greatest max_length that fits, in steps of 64 tokens; None if half is too much."""
    lengths = range(job.length // GRAIN * GRAIN, int(job.length * SHORTEST), -GRAIN)
    return next((n for n in lengths if request.fits(replace(job, length=n))), None)


def others(request: Request, job: Job) -> Iterator[tuple[str, Job]]:
    """Smaller moments, another launch kind, more GPUs (of CPU processes: fewer), another method."""
    if (job.method, job.launch, job.optimizer) == ("full", "ddp", "adamw"):
        yield "`optimizer: {name: adamw_8bit}`", replace(job, optimizer="adamw_8bit")
    launches = [x for x in ("zero3", "zero3-offload") if allowed(job.method, x, job.classes)]
    sharing = [x for x in launches if BY_SHARING.index(x) > BY_SHARING.index(job.launch)]
    for launch in sharing:
        yield f"`launch: {launch}`", replace(job, launch=launch)
    nodes, here = job.world // job.per_node, job.per_node
    for gpus in range(here - 1, 0, -1) if job.cpu else range(here + 1, MOST_GPUS + 1):
        world = gpus * nodes
        for launch in [job.launch, *sharing[:1]] if request.global_batch % world == 0 else []:
            chosen = f"`gpus: {gpus}`"
            if launch != job.launch:
                chosen += f" and `launch: {launch}`"
            yield chosen, replace(job, world=world, per_node=gpus, launch=launch)
    for method in ("lora", "qlora"):
        smaller = METHODS.index(method) < METHODS.index(job.method)
        if smaller and allowed(method, "ddp", job.classes):
            yield f"`method: {method}`", replace(job, method=method, launch="ddp")


def allowed(method: str, launch: str, classes: int | None) -> bool:
    """By the rules of the config."""
    task = "sequence-classification" if classes else "causal-lm"
    return why_refused(task, method, launch) is None


def last_remedies(plan: dict) -> str:
    """When one row at a time was too much, whatever had been predicted."""
    settings, advice = plan["settings"], []
    if not plan["gradient_checkpointing"]:
        advice.append("`gradient_checkpointing: true`")
    advice.append("a shorter max_length")
    method, launch = settings["method"], settings["launch"]
    if settings["task"] == "sequence-classification":  # DDP and 16 bit are all there is
        advice += ["`method: lora`"] if method == "full" else []
    elif method != "qlora":
        following = {"zero3": "zero3-offload", "zero3-offload": None}.get(launch, "zero3")
        advice += [f"`launch: {following}`"] if following else []
        advice += ["more gpus"] if method == "full" else []
        advice.append("`method: qlora`")
    return f"Try, in this order: {', '.join(advice)}."
