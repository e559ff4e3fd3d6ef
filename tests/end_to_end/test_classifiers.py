"""Classifiers, for real: an encoder and a decoder, trained by two processes, merged, evaluated,
and opened by transformers alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from classifiers import LABELLED, LABELS, make_labelled_tokens, make_tiny_bert
from finetune.config import Dataset, Model, Run, complete_run
from finetune.stages import evaluate_settings, fetch_settings, merge_settings, plan_settings
from finetune.stages import train_settings as train_settings_of
from finetune.tokenizer import load_tokenizer

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
COMBINATIONS = [
    ("bert", "full"),
    pytest.param(("bert", "lora"), marks=pytest.mark.slow),
    ("llama", "lora"),
]
RATES = {"full": 3e-3, "lora": 1e-2}


def script(name: str, settings: dict, **paths: object) -> str:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--settings", json.dumps(settings)]
    for option, value in paths.items():
        command += [f"--{option.replace('_', '-')}", str(value)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="session")
def bases(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/{bert,llama}/ as fetch_model leaves them, and tokens/ of labelled rows for each."""
    folder = tmp_path_factory.mktemp("classifiers")
    make_tiny_bert(folder / "tiny_bert")
    for name, source in {"bert": folder / "tiny_bert", "llama": tiny_model}.items():
        at = folder / "models" / name
        settings = fetch_settings(Model(source=str(source)))
        script("fetch_model", settings, pretrained=at / "pretrained", record=at / "model.json")
        make_labelled_tokens(folder / "tokens" / name, load_tokenizer(at / "pretrained"))
    rows = [LABELLED[i * 7 % 40] for i in range(34, 40)]
    columns = {"id": [f"r{i}" for i in range(6)]}
    columns |= dict(zip(("text", "label"), map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table(columns), folder / "test.parquet")
    return folder


def run_of(method: str, **changes: object) -> Run:
    run = {"model": "m", "dataset": "d", "task": "sequence-classification", "method": method}
    run |= {"gpus": 2, "batch": {"global": 4, "micro": 1}, "steps": 40, "validate_every": 20}
    run |= {"gradient_checkpointing": False, "optimizer": {"learning_rate": RATES[method]}}
    run |= {"schedule": {"name": "linear"}, "lora": {"rank": 8, "dropout": 0.0}, "log_every": 1}
    return Run.model_validate(complete_run({}, run | changes))


def train(bases: Path, kind: str, run: Run, folder: Path) -> Path:
    """plan_run and train. Returns the folder of the run."""
    model, tokens = bases / "models" / kind, bases / "tokens" / kind
    plan = {"model": model / "model.json", "lint": tokens / "lint.json"}
    plan |= {"pretrained": model / "pretrained", "output": folder / "plan.json"}
    known = {"calibration": folder / "calibration.jsonl"}
    settings = plan_settings(run, Dataset(source="rows.jsonl"), Model(source="m"))
    script("plan_run", settings, **plan, **known)
    settings = train_settings_of(run, Model(source="m"))
    files = {"output": "trained", "metrics": "metrics.jsonl", "record": "train.json"}
    paths = {option: folder / name for option, name in files.items()}
    paths |= {"plan": folder / "plan.json", "config": folder / "train.yaml"}
    paths |= {"model": model / "pretrained", "tokens": tokens}
    script("launch", settings, gpus=run.gpus, threads=2, **paths, **known)
    return folder


def evaluate(bases: Path, kind: str, model: Path, folder: Path) -> dict:
    tokens = bases / "tokens" / kind
    settings = evaluate_settings(Dataset(source="rows.jsonl"), Model(source="m"))
    paths = {"tokens": tokens / "test", "lint": tokens / "lint.json"}
    paths |= {name: folder / f"{name}.json" for name in ("metrics", "predictions")}
    script("evaluate_model", settings, model=model, data=bases / "test.parquet", **paths)
    return json.loads((folder / "metrics.json").read_text())


@pytest.fixture(scope="session", params=COMBINATIONS, ids="-".join)
def trained(request, bases: Path, tmp_path_factory: pytest.TempPathFactory):
    """(kind, method, folder of a run that is trained, merged and evaluated)."""
    kind, method = request.param
    run = run_of(method)
    folder = train(bases, kind, run, tmp_path_factory.mktemp(f"{kind}-{method}"))
    paths = {"trained": folder / "trained", "train_record": folder / "train.json"}
    paths |= {"base": bases / "models" / kind / "pretrained", "tokens": bases / "tokens" / kind}
    paths |= {"output": folder / "model", "record": folder / "merge.json"}
    script("merge", merge_settings(run, Model(source="m")), **paths)
    evaluate(bases, kind, folder / "model", folder)
    return kind, method, folder


def read(path: Path):
    return json.loads(path.read_text())


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_training_is_two_processes_that_learn(trained) -> None:
    *_, folder = trained
    record, lines = read(folder / "train.json"), log_of(folder)
    assert (record["world_size"], record["accumulation"], record["steps"]) == (2, 2, 40)
    assert record["gradient_checks"] == 2
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 41))
    early, late = (line for line in lines if "eval_loss" in line)
    assert {"step", "epoch", "eval_loss", "eval_accuracy"} == set(early)
    assert late["eval_loss"] < early["eval_loss"] or late["eval_accuracy"] == 1


def test_adapters_and_the_head_are_what_is_trained(trained, bases: Path) -> None:
    kind, method, folder = trained
    model = read(bases / "models" / kind / "model.json")
    head = 64 * 3 + 3 * (kind == "bert")
    adapter = sum(
        8 * (layer["in_features"] + layer["out_features"]) * layer["count"]
        for layer in model["shapes"]["linear"]
    )
    expected = model["parameters"] if method == "full" else adapter
    placement = read(folder / "train.json")["placement"]
    assert placement["trainable_parameters"] == expected + head


def test_the_merge_holds_every_tensor(trained, bases: Path) -> None:
    kind, method, folder = trained
    record, model = read(folder / "merge.json"), read(bases / "models" / kind / "model.json")
    assert record["parameters"] == model["parameters"] + 64 * 3 + 3 * (kind == "bert")
    if method == "lora":
        assert record["max_logit_difference"] < 0.1 * record["max_logit"]


OPEN = """
import sys
sys.modules["peft"] = None  # importing it is now an error
from transformers import AutoModelForSequenceClassification, AutoTokenizer
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
texts = ["turn on the light in the kitchen two", "turn off the light in the bedroom one"]
classes = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.argmax(-1).tolist()
print(model.dtype, model.config.pad_token_id == tokenizer.pad_token_id)
print(*(model.config.id2label[index] for index in classes))
"""


def test_the_model_opens_without_peft_and_names_the_classes(trained) -> None:
    *_, folder = trained
    command = [sys.executable, "-c", OPEN, str(folder / "model")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["torch.bfloat16 True", "on off"], done.stderr[-2000:]
    assert "pipeline_tag: text-classification" in (folder / "model" / "README.md").read_text()
    assert not (folder / "model" / "generation_config.json").exists()


def test_the_evaluation_is_of_the_merged_model(trained) -> None:
    *_, folder = trained
    metrics = read(folder / "metrics.json")
    lines = [json.loads(line) for line in (folder / "predictions.json").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"r{i}" for i in range(6)]
    right = sum(line["prediction"] == line["reference"] for line in lines)
    assert metrics["accuracy"] == right / 6 >= 5 / 6
    assert metrics["rows"] == sum(map(sum, metrics["confusion_matrix"]["counts"])) == 6
    assert list(metrics["per_class"]) == LABELS
    assert "baseline" not in metrics
    assert metrics["loss"] < 0.6


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_baseline_is_the_class_prior(bases: Path, kind: str, tmp_path: Path) -> None:
    metrics = evaluate(bases, kind, bases / "models" / kind / "pretrained", tmp_path)
    counts = read(bases / "tokens" / kind / "lint.json")["label_counts"]
    likely = LABELS[counts.index(max(counts))]
    wanted = [label for _, label in (LABELLED[i * 7 % 40] for i in range(34, 40))]
    chance = {name: (n + 1) / (28 + 3) for name, n in zip(LABELS, counts, strict=True)}
    assert metrics["baseline"] == "class prior"
    assert metrics["accuracy"] == pytest.approx(wanted.count(likely) / 6)
    loss = sum(-math.log(chance[label]) for label in wanted) / 6
    assert metrics["loss"] == pytest.approx(loss)


def test_a_split_of_the_batch_over_processes_changes_nothing(bases: Path, tmp_path: Path) -> None:
    """Micro-batch 4 in one process, and 1 x 2 steps in two: the same first loss and gradient.
    The decoder has no dropout, and all its weights are trained, in fp32 but for autocast."""
    logs = []
    for gpus, micro in ((1, 4), (2, 1)):
        run = run_of("full", gpus=gpus, batch={"global": 4, "micro": micro}, steps=1)
        (tmp_path / str(gpus)).mkdir()
        folder = train(bases, "llama", run, tmp_path / str(gpus))
        record = read(folder / "train.json")
        assert (record["world_size"], record["accumulation"]) == (gpus, gpus)
        logs.append(log_of(folder)[0])
    assert logs[1]["loss"] == pytest.approx(logs[0]["loss"], rel=1e-3)
    assert logs[1]["grad_norm"] == pytest.approx(logs[0]["grad_norm"], rel=1e-2)
    assert logs[1]["tokens"] == logs[0]["tokens"]
