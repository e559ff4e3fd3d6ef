"""A run beside the runs it could have been: other methods, launch kinds and numbers of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from finetune.advice import METHODS, Request, allowed, smallest_change
from finetune.devices import GB
from finetune.host import host_memory
from finetune.memory import Job

LAUNCHES = ("ddp", "zero2", "zero3", "zero3-offload")
WORLDS = (1, 2, 4, 8)
COLUMNS = ("method", "launch", "gpus", "GB each", "host GB", "batch", "recompute", "fits, or with")
HEADER = ("", *COLUMNS)


def neighbours(request: Request, run: Job) -> list[dict]:
    """This run first, then the others, each with the micro-batch that is best for it. `gpu` and
    `host` are bytes, of one process and of one node."""
    return [
        entry(request, run, True),
        *(entry(request, job, False) for job in around(request, run)),
    ]


def around(request: Request, run: Job) -> Iterator[Job]:
    """Pairs that the config refuses are left out, and so are batches that do not divide."""
    for method in METHODS:
        for launch in LAUNCHES:
            for world in WORLDS if allowed(method, launch, run.classes) else ():
                job = replace(run, method=method, launch=launch, world=world, per_node=world)
                same = (method, launch, world) == (run.method, run.launch, run.world)
                if not same and request.global_batch % world == 0:
                    yield free(request).best(job)


def free(request: Request) -> Request:
    """Others choose their micro-batch anew: what the user set was for this run."""
    return replace(request, micro="auto", recompute="auto")


def entry(request: Request, job: Job, this: bool) -> dict:
    fits = request.fits(job)
    return {
        "this": this,
        "method": job.method,
        "launch": job.launch,
        "gpus": job.world,
        "fits": fits,
        "gpu": request.needs(job),
        "host": host_memory(request.shapes, job)["train"],
        "micro_batch": job.micro,
        "accumulation": request.global_batch // (job.micro * job.world),
        "gradient_checkpointing": job.checkpointing,
        "change": None if fits else smallest_change(request, job),
    }


def table(entries: list[dict]) -> str:
    """For the terminal. An arrow marks this run."""
    rows = [HEADER, *map(cells, entries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def cells(entry: dict) -> tuple[str, ...]:
    return (
        "->" if entry["this"] else "",
        entry["method"],
        entry["launch"],
        str(entry["gpus"]),
        f"{entry['gpu'] / GB:.1f}",
        f"{entry['host'] / GB:.0f}",
        f"{entry['micro_batch']} x {entry['accumulation']} x {entry['gpus']}",
        "yes" if entry["gradient_checkpointing"] else "no",
        "yes" if entry["fits"] else (entry["change"] or "nothing that was tried").replace("`", ""),
    )
