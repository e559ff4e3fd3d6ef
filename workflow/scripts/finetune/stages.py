"""The config keys that each stage uses, and no others.

Rules pass these as params, so Snakemake runs a stage again when, and only when, one of its own
keys changes. Where the work is done (GPUs, memory) changes no result and triggers no training.
"""

from __future__ import annotations

from finetune.config import Config, Dataset, Model, Run

METHOD_SECTIONS = {
    "qlora": ("lora", "quantization", "merge"),
    "lora": ("lora", "merge"),
    "full": (),
}
"""Sections of a run that only some methods read, by method."""
WHERE = (
    *("gpus", "nodes", "gpu_memory_gb", "gpu_model", "allow_oversubscription"),
    *("gradient_checkpointing", "compile", "checkpoint_minutes", "timeout_minutes"),
)
"""Keys of a run that say where and how it is trained, and change nothing of what comes out."""
PLAN_ONLY = (*WHERE, "batch", "checks", "evaluation")
"""What a finished run keeps of its plan when it changes. `batch.global` is not only the plan's: by
it a run is trained, and planned, again."""


def fetch_settings(model: Model) -> dict:
    return model.model_dump(exclude={"attention", "template_options"})


def prepare_settings(dataset: Dataset) -> dict:
    return dataset.model_dump(
        include={"source", "format", "columns", "sample_by", "split", "max_rejects"}
    )


def tokenize_settings(dataset: Dataset, model: Model) -> dict:
    text = {"system_prompt", "train_on", "max_length", "truncate", "packing"}
    return dataset.model_dump(include=text) | template_settings(model)


def check_settings(dataset: Dataset) -> dict:
    return dataset.model_dump(include={"checks"})


def template_settings(model: Model) -> dict:
    return model.model_dump(include={"trust_remote_code", "template_options"})


def run_settings(run: Run, exclude: dict) -> dict:
    """A run without the sections that its method does not read."""
    idle = set(METHOD_SECTIONS["qlora"]) - set(METHOD_SECTIONS[run.method])
    unused = dict.fromkeys({"merge", *idle}, True)
    return run.model_dump(by_alias=True, exclude=unused | exclude)


def plan_settings(run: Run, dataset: Dataset, model: Model) -> dict:
    unused = ("schedule", "log_every", "validate_every", "seed")
    settings = run_settings(run, dict.fromkeys(unused, True))
    settings |= check_settings(dataset) | code_settings(model)
    return settings | {"evaluation": dataset.evaluation.model_dump(include={"gpus"})}


def train_settings(run: Run, model: Model) -> dict:
    """Without what plan.json settles: it splits the batch, the result is the same."""
    settings = run_settings(run, dict.fromkeys(WHERE, True) | {"batch": {"micro"}})
    return settings | code_settings(model)


def code_settings(model: Model) -> dict:
    """How the model is run in training."""
    return model.model_dump(include={"attention", "trust_remote_code"})


def merge_settings(run: Run, model: Model) -> dict:
    sections = set(METHOD_SECTIONS[run.method]) - {"lora"}
    settings = run.model_dump(include={"task", "method"})
    settings |= model.model_dump(include={"trust_remote_code"})
    return settings | run.model_dump(include=sections)


def evaluate_settings(dataset: Dataset, model: Model) -> dict:
    settings = dataset.evaluation.model_dump(exclude={"gpus"})
    settings |= dataset.model_dump(include={"system_prompt"})
    return settings | template_settings(model)


def baselines(config: Config) -> list[tuple[str, str]]:
    """Each (model, dataset) that some run starts from, in the order of the runs."""
    return list(dict.fromkeys((run.model, run.dataset) for run in config.runs.values()))
