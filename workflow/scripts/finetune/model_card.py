"""The README.md of a finished model: what it was made from, how, and by which code."""

from __future__ import annotations

import yaml

TEMPLATE = """\
---
{header}---

# {title}

Fine-tuned from `{base}` for {task} with `{method}` under `{launch}`.

| fact | value |
|---|---|
{rows}

The settings below, the base model and data of these digests make this model again.

```yaml
{settings}```
"""


def model_card(facts: dict) -> str:
    """Markdown with the metadata block the hub reads. `facts` is train.json."""
    settings, base = facts["settings"], facts["model"]["source"]
    header: dict = {"library_name": "transformers", "tags": ["fine-tuned", settings["method"]]}
    if settings["task"] == "sequence-classification":
        header["pipeline_tag"] = "text-classification"
    if facts["model"]["commit"]:  # then it came from the hub, which links cards by this key
        header["base_model"] = base
    return TEMPLATE.format(
        header=yaml.safe_dump(header),
        title=f"{base.rstrip('/').rsplit('/', 1)[-1]}, fine-tuned",
        base=base,
        task=settings["task"],
        method=settings["method"],
        launch=settings["launch"],
        rows="\n".join(f"| {name} | {value} |" for name, value in table(facts)),
        settings=yaml.safe_dump(settings, sort_keys=False),
    )


def table(facts: dict) -> list[tuple[str, str]]:
    """The facts a reader asks for first."""
    commit, versions = facts["model"]["commit"], facts["versions"]
    split = f"{facts['micro_batch']} x {facts['accumulation']} x {facts['world_size']}"
    return [
        ("base commit", commit or "none: see digest"),
        ("base digest", facts["model_digest"]),
        ("training data digest", facts["data_digests"]["train"]),
        ("steps", str(facts["steps"])),
        ("batch (micro x accumulation x processes)", split),
        ("learning rate", str(facts["learning_rate"])),
        ("precision", facts["precision"]),
        ("device", f"{facts['world_size']} x {facts['device']}"),
        ("workflow commit", facts["code"] or "unknown"),
        ("versions", ", ".join(f"{name} {v}" for name, v in versions.items())),
    ]
