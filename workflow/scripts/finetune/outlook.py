"""What is planned from: a run's settings, the shapes of its model and the lengths of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from finetune.advice import Request, correction, refusal
from finetune.attention import default_attention, longest_row
from finetune.calibration import EarlierRuns, Finished
from finetune.cli import UserError, say
from finetune.config import Lora, Quantization
from finetune.devices import Device
from finetune.host import disk_space, host_memory
from finetune.memory import Job, predicted, training_memory
from finetune.neighbours import neighbours
from finetune.shapes import Shapes, shapes_of


def job_of(settings: dict, shapes: Shapes, lint: dict, device: Device) -> Job:
    """What the settings and the data say; micro-batch and checkpointing are still open. Methods
    that the run could have had instead take the default adapters and quantization."""
    lora = settings.get("lora") or Lora().model_dump()
    quantization = settings.get("quantization") or Quantization().model_dump()
    targets, train = lora["target_modules"], lint["train"]
    return Job(
        method=settings["method"],
        launch=settings["launch"],
        world=settings["gpus"] * settings["nodes"],
        per_node=settings["gpus"],
        micro=1,
        length=train["longest"],
        supervised=train["most_supervised"],
        checkpointing=True,
        # FlashAttention, of which a plan does not know, takes less than what transformers picks
        attention=settings["attention"]
        or default_attention(longest_row(lint), device.cpu)
        or shapes.attention,
        cpu=device.cpu,
        rank=lora["rank"],
        targets=targets if isinstance(targets, str) else tuple(targets),
        dropout=lora["dropout"],
        double=quantization["double"],
        classes=len(lint["labels"]) if lint["labels"] else None,
        optimizer=settings["optimizer"]["name"],
    )


def request_of(
    settings: dict, shapes: Shapes, device: Device, earlier: Sequence[Finished] = ()
) -> Request:
    batch = settings["batch"]
    recompute = settings["gradient_checkpointing"]
    runs = earlier_of(settings, device, earlier)
    return Request(shapes, device, batch["global"], batch["micro"], recompute, runs)


def earlier_of(settings: dict, device: Device, earlier: Sequence[Finished]) -> EarlierRuns:
    """Of a GPU that is only told by its memory or model, a run's record has another name."""
    told = settings["gpu_memory_gb"] or settings["gpu_model"]
    name = "CPU" if device.cpu else None if told else device.name
    return EarlierRuns(earlier, settings["model"], name, "cpu" if device.cpu else "gpu")


def checked(request: Request, job: Job, oversubscribe: bool) -> Job:
    """The job with its batch split. Raises UserError, with what to change, if it cannot fit."""
    job = request.best(job)
    if not request.fits(job):
        text = refusal(request, job)
        if not oversubscribe:
            raise UserError(text)
        say(f"WARNING: {text} It is started all the same: allow_oversubscription.")
    elif request.predicts(job) > request.room(job).available:
        say(
            f"WARNING: {correction(request, job)}That would be refused, and is started "
            "because of those runs."
        )
    return job


def memory_section(request: Request, job: Job) -> dict:
    """`memory` of plan.json, in bytes: of one process by part; of one node by rule. As predicted,
    and beside it what `calibration` makes of it, null where no earlier run is of the kind."""
    parts, room = training_memory(request.shapes, job), request.room(job)
    total, host = predicted(parts), host_memory(request.shapes, job)
    return {
        "parts": parts,
        "total": total,
        "available": round(room.available),
        "device": room.name,
        "cpu": job.cpu,
        "host": host,
        "disk": disk_space(request.shapes, job),
        "calibration": {
            "process": request.earlier.correction(job, "process", total),
            "node": request.earlier.correction(job, "node", host["train"]),
        },
    }


def shapes_in(
    source: str | Path, trust_remote_code: bool, labels: list[str] | None = None
) -> Shapes:
    """Shapes of a folder, a config.json or a hub id. No weight is read or fetched."""
    from huggingface_hub import is_offline_mode

    from finetune import architecture

    try:
        model = architecture.outline(source, trust_remote_code, labels)
        if labels is None and not architecture.is_causal(model.config):
            raise ValueError(f"{type(model).__name__} writes no text")
        return shapes_of(model)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or Path(source).exists():
            why = str(error).splitlines()[0]  # then all the classes that transformers has
            raise UserError(f"{source} cannot be planned with: {why}") from error
        away = (
            "HF_HUB_OFFLINE is set" if is_offline_mode() else "the hub did not give its config.json"
        )
        raise UserError(
            f"{source}: no such folder or file here, and {away}. Give a folder, a config.json, or "
            "the id of a hub model (of a gated one after `hf auth login`)."
        ) from error


def outlook(shapes: Shapes, settings: dict, lint: dict, device: Device) -> list[dict]:
    """The table for a run that need not exist: its entry, whether it fits or not, and others."""
    request = request_of(settings, shapes, device)
    return neighbours(request, request.best(job_of(settings, shapes, lint, device)))
