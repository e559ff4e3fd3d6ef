"""Whatever befalls a run, started again until it ends it is the run that nothing befell."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chaos import KINDS, STEPS, Chaos, Cost, table

RUNS = ("tiny-qlora", "tiny-full")
BF16 = 0.01


def weights(folder: Path) -> dict[str, torch.Tensor]:
    [file] = (folder / "trained").glob("*.safetensors")
    return load_file(file)


def lines(folder: Path, name: str) -> dict[int, float]:
    """What was logged, by step; each step once."""
    logged = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [(line["step"], line[name]) for line in logged if name in line]
    assert len(dict(found)) == len(found)
    return dict(found)


def check(calm: Path, disturbed: Path, costs: list[Cost]) -> None:
    """Bitwise, but where memory ran out: another micro-batch rounds otherwise, in bf16, and Adam
    makes whole steps of the least gradients. The losses agree there."""
    record = json.loads((disturbed / "train.json").read_text())
    assert (record["steps"], record["global_batch"]) == (STEPS, 4)
    events = [event["event"] for event in record["events"]]
    assert len(events) > len(costs)
    tolerance = BF16 if "out of memory" in events else 0
    for name in ("loss", "eval_loss", "tokens"):
        expected, found = lines(calm, name), lines(disturbed, name)
        assert found == pytest.approx(expected, rel=tolerance, abs=0), name
    if not tolerance:
        expected, found = weights(calm), weights(disturbed)
        assert all(expected[name].equal(found[name]) for name in expected), events


@pytest.fixture(scope="session")
def calm(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Chaos:
    project = Chaos(finished, tmp_path_factory.mktemp("chaos") / "calm", seed=0)
    for run in RUNS:
        project.train(run, [])
    return project


@pytest.mark.parametrize("run", ["tiny-qlora", pytest.param("tiny-full", marks=pytest.mark.slow)])
def test_a_disturbed_run_ends_as_if_nothing_had_been(
    finished: Path, calm: Chaos, tmp_path: Path, run: str
) -> None:
    seed = random.randrange(10**6)
    project = Chaos(finished, tmp_path / "project", seed)
    costs = project.train(run, project.draw.sample(KINDS[:-1], 2))
    print(f"seed {seed}\n{table(costs)}")
    check(*(p.folder / "results" / "runs" / run for p in (calm, project)), costs)


@pytest.mark.slow
def test_ten_disturbed_runs(finished: Path, calm: Chaos, tmp_path: Path) -> None:
    for number in range(10):
        run = RUNS[number % 2]
        project = Chaos(finished, tmp_path / str(number), seed=number)
        faults = [KINDS[(3 * number + i) % len(KINDS)] for i in range(3)]
        costs = project.train(run, faults)
        print(table(costs), flush=True)
        check(*(p.folder / "results" / "runs" / run for p in (calm, project)), costs)
