"""Stages: the exact keys each one gets, and which of them a change of the config touches."""

import pytest

from finetune import stages
from finetune.config import Config, merge
from finetune.config_errors import load_config

RAW = {
    "models": {"small": {"source": "org/small"}, "big": {"source": "org/big"}},
    "datasets": {"news": {"source": "news.jsonl"}},
    "defaults": {"model": "small", "dataset": "news"},
    "runs": {"a": {"method": "qlora"}},
}
PLAN = {
    "model",
    "dataset",
    "task",
    "checks",
    "evaluation",
    "method",
    "launch",
    "gpus",
    "nodes",
    "gpu_memory_gb",
    "gpu_model",
    "allow_oversubscription",
    "batch",
    "optimizer",
} | {
    "epochs",
    "steps",
    "gradient_checkpointing",
    "compile",
    "checkpoint_minutes",
    "timeout_minutes",
    "attention",
    "trust_remote_code",
}
TRAIN = (PLAN - set(stages.PLAN_ONLY)) | {
    "batch",
    "schedule",
    "log_every",
    "validate_every",
    "seed",
    "attention",
    "trust_remote_code",
}
QLORA = {"lora", "quantization"}
TOKENIZE = {"system_prompt", "train_on", "max_length", "truncate", "packing"} | {
    "trust_remote_code",
    "template_options",
}


def config_with(method: str = "qlora", changes: dict | None = None) -> Config:
    return load_config(merge(merge(RAW, {"runs": {"a": {"method": method}}}), changes or {}))


def all_settings(config: Config) -> dict[str, dict]:
    run = config.runs["a"]
    model, dataset = config.models[run.model], config.datasets[run.dataset]
    return {
        "fetch": stages.fetch_settings(model),
        "prepare": stages.prepare_settings(dataset),
        "tokenize": stages.tokenize_settings(dataset, model),
        "plan": stages.plan_settings(run, dataset, model),
        "train": stages.train_settings(run, model),
        "merge": stages.merge_settings(run, model),
        "evaluate": stages.evaluate_settings(dataset, model),
    }


@pytest.mark.parametrize(
    ("method", "stage", "keys"),
    [
        (
            "qlora",
            "fetch",
            {"source", "revision", "trust_remote_code", "chat_template", "pad_token"},
        ),
        (
            "qlora",
            "prepare",
            {"source", "format", "columns", "sample_by", "split", "max_rejects"},
        ),
        ("qlora", "tokenize", TOKENIZE),
        (
            "qlora",
            "evaluate",
            {
                "metrics",
                "max_new_tokens",
                "batch_size",
                "rows",
                "system_prompt",
                "trust_remote_code",
                "template_options",
            },
        ),
        ("qlora", "plan", PLAN | QLORA),
        ("lora", "plan", PLAN | {"lora"}),
        ("full", "plan", PLAN),
        ("qlora", "train", TRAIN | QLORA),
        ("lora", "train", TRAIN | {"lora"}),
        ("full", "train", TRAIN),
        ("qlora", "merge", {"task", "method", "merge", "quantization", "trust_remote_code"}),
        ("lora", "merge", {"task", "method", "merge", "trust_remote_code"}),
        ("full", "merge", {"task", "method", "trust_remote_code"}),
    ],
)
def test_keys_of_a_stage(method, stage, keys) -> None:
    assert set(all_settings(config_with(method))[stage]) == keys


def test_batch_is_whole_in_the_plan_and_global_in_training() -> None:
    settings = all_settings(config_with())
    assert settings["plan"]["batch"] == {"global": 16, "micro": "auto"}
    assert settings["train"]["batch"] == {"global": 16}


RUN, MODEL, DATASET = ("runs", "a"), ("models", "small"), ("datasets", "news")
CODE = {"fetch", "tokenize", "plan", "train", "merge", "evaluate"}
CHANGES = [
    # where the work is done
    (RUN, {"gpus": 4}, {"plan"}),
    (RUN, {"gpu_memory_gb": 24}, {"plan"}),
    (RUN, {"gpu_model": "h100"}, {"plan"}),
    (RUN, {"allow_oversubscription": True}, {"plan"}),
    (RUN, {"batch": {"micro": 4}}, {"plan"}),
    (RUN, {"checkpoint_minutes": 5}, {"plan"}),
    (RUN, {"timeout_minutes": 5}, {"plan"}),
    # how models are judged
    (DATASET, {"evaluation": {"metrics": ["json"]}}, {"evaluate"}),
    (DATASET, {"evaluation": {"max_new_tokens": 9}}, {"evaluate"}),
    (DATASET, {"evaluation": {"batch_size": 2}}, {"evaluate"}),
    (DATASET, {"evaluation": {"rows": 5}}, {"evaluate"}),
    (DATASET, {"evaluation": {"gpus": 2}}, {"plan"}),
    # models
    (MODEL, {"attention": "eager"}, {"plan", "train"}),
    (MODEL, {"source": "org/other"}, {"fetch"}),
    (MODEL, {"revision": "v2"}, {"fetch"}),
    (MODEL, {"chat_template": "chatml"}, {"fetch"}),
    (MODEL, {"pad_token": "<pad>"}, {"fetch"}),
    (MODEL, {"template_options": {"x": 1}}, {"tokenize", "evaluate"}),
    (MODEL, {"trust_remote_code": True}, CODE),
    # data
    (DATASET, {"source": ["a.csv", "b.csv"]}, {"prepare"}),
    (DATASET, {"source": {"path": "news.jsonl"}}, set()),  # the same, written otherwise
    (DATASET, {"source": {"path": "news.jsonl", "rows": 9}}, {"prepare"}),
    (DATASET, {"sample_by": "line"}, {"prepare"}),
    (DATASET, {"format": "messages"}, {"prepare"}),
    (DATASET, {"columns": {"prompt": "q"}}, {"prepare"}),
    (DATASET, {"split": {"seed": 7}}, {"prepare"}),
    (DATASET, {"split": {"group": "user"}}, {"prepare"}),
    (DATASET, {"max_rejects": 0.5}, {"prepare"}),
    (DATASET, {"max_length": 99}, {"tokenize"}),
    (DATASET, {"truncate": "end"}, {"tokenize"}),
    (DATASET, {"packing": True}, {"tokenize"}),
    (DATASET, {"train_on": "all"}, {"tokenize"}),
    (DATASET, {"checks": {"max_dropped": 0.5}}, {"plan"}),
    (DATASET, {"system_prompt": "Be brief."}, {"tokenize", "evaluate"}),
    # training
    (RUN, {"model": "big"}, {"fetch", "plan", "train"}),
    (RUN, {"batch": {"global": 32}}, {"plan", "train"}),
    (RUN, {"optimizer": {"learning_rate": 1e-3}}, {"plan", "train"}),
    (RUN, {"optimizer": {"name": "adamw_8bit"}}, {"plan", "train"}),
    (RUN, {"epochs": 3}, {"plan", "train"}),
    (RUN, {"steps": 30}, {"plan", "train"}),
    (RUN, {"gradient_checkpointing": False}, {"plan"}),
    (RUN, {"compile": True}, {"plan"}),
    (RUN, {"lora": {"rank": 4}}, {"plan", "train"}),
    (RUN, {"quantization": {"double": False}}, {"plan", "train", "merge"}),
    (RUN, {"schedule": {"warmup": 0.1}}, {"train"}),
    (RUN, {"log_every": 1}, {"train"}),
    (RUN, {"validate_every": 9}, {"train"}),
    (RUN, {"seed": 5}, {"train"}),
    (RUN, {"merge": {"base": "original"}}, {"merge"}),
    (RUN, {"merge": {"tolerance": 0.5}}, {"merge"}),
    # another run, model or dataset
    (("runs", "b"), {"seed": 1}, set()),
    (("models", "big"), {"revision": "v2"}, set()),
    (("datasets", "other"), {"source": "x.csv"}, set()),
]


def touched(before: dict, after: dict) -> set[str]:
    return {stage for stage in before if before[stage] != after[stage]}


@pytest.mark.parametrize(("section", "change", "expected"), CHANGES)
def test_change_touches_the_right_stages(section, change, expected) -> None:
    kind, name = section
    before = all_settings(config_with())
    assert touched(before, all_settings(config_with(changes={kind: {name: change}}))) == expected


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("lora", {"quantization": {"type": "fp4"}}),
        ("full", {"quantization": {"type": "fp4"}}),
        ("full", {"lora": {"rank": 2}}),
        ("full", {"merge": {"base": "original"}}),
    ],
    ids=str,
)
def test_default_that_a_method_never_reads_touches_nothing(method, change) -> None:
    before = all_settings(config_with(method))
    after = all_settings(config_with(method, {"defaults": change}))
    assert touched(before, after) == set()


def test_every_key_of_the_config_is_used_by_some_stage() -> None:
    """A key that no stage gets would be a silent no-op."""
    config = config_with()
    settings, dataset = all_settings(config), config.datasets["news"]
    used = set().union(*settings.values(), settings["plan"]["evaluation"])
    sections = (config.models["small"], dataset, dataset.evaluation, config.runs["a"])
    assert set().union(*(type(section).model_fields for section in sections)) == used


def test_baselines_are_named_once_in_the_order_of_the_runs() -> None:
    runs = {"b": {"model": "big"}, "c": {}, "d": {"model": "big", "seed": 3}}
    config = config_with(changes={"runs": runs})
    assert stages.baselines(config) == [("small", "news"), ("big", "news")]
