"""What befell a run: starts, resumes, stops, back-offs and faults, over all its launches.

Beside the checkpoints until the run is finished; then in train.json.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from finetune.files import read_json, write_json

HISTORY = "history.json"
BEGINS = ("started", "resumed")


def read_history(folder: Path) -> list[dict]:
    path = folder / HISTORY
    return read_json(path) if path.exists() else []


def record(folder: Path, event: str, step: int, **facts: object) -> None:
    """Add an event. Only the launcher does, and there is one."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    line = {"event": event, "step": step, "time": time, **facts}
    write_json(folder / HISTORY, [*read_history(folder), line])


def note_kill(folder: Path, step: int, peak: dict[str, int]) -> None:
    """An attempt that began and never ended was killed along with its launcher."""
    events = read_history(folder)
    if events and events[-1]["event"] in BEGINS:
        micro = events[-1]["micro_batch"]
        record(folder, "killed", step, micro_batch=micro, peak_memory=peak)


def seconds_spent(events: list[dict]) -> float:
    """Wall time of all launches that have ended."""
    return sum(event.get("seconds", 0) for event in events)


def peaks_reached(events: list[dict]) -> list[dict[str, int]]:
    """The peak memory of each attempt that ended before the run was finished."""
    return [event.get("peak_memory", {}) for event in events]


def backed_off(events: list[dict]) -> int | None:
    """The micro-batch that memory sufficed for last, if it ever ran out."""
    found = [event["next_micro_batch"] for event in events if event["event"] == "out of memory"]
    return found[-1] if found else None
