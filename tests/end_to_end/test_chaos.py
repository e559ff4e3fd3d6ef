"""Whatever befalls a run, started again until it ends it is the run that nothing befell."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file

from chaos import KINDS, STEPS, Chaos, Cost, table

RUNS = ("tiny-qlora", "tiny-full")


def weights(folder: Path) -> dict:
    [file] = (folder / "trained").glob("*.safetensors")
    return load_file(file)


def check(calm: Path, disturbed: Path, costs: list[Cost]) -> None:
    """Bitwise, but where memory ran out: another micro-batch rounds otherwise."""
    record = json.loads((disturbed / "train.json").read_text())
    assert (record["steps"], record["global_batch"]) == (STEPS, 4)
    lines = [json.loads(x) for x in (disturbed / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "eval_loss" in line] == list(range(2, STEPS + 1, 2))
    events = [event["event"] for event in record["events"]]
    assert len(events) > len(costs)
    expected, found = weights(calm), weights(disturbed)
    same = all(expected[name].equal(found[name]) for name in expected)
    if "out of memory" in events:
        for name, tensor in expected.items():
            assert found[name].float().sub(tensor.float()).norm() < 0.05 * tensor.float().norm()
    else:
        assert same, events


@pytest.fixture(scope="session")
def calm(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Chaos:
    project = Chaos(finished, tmp_path_factory.mktemp("chaos") / "calm", seed=0)
    for run in RUNS:
        project.train(run, [])
    return project


@pytest.mark.parametrize("run", RUNS)
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
    costs = []
    for number in range(10):
        run = RUNS[number % 2]
        project = Chaos(finished, tmp_path / str(number), seed=number)
        faults = [KINDS[(3 * number + i) % len(KINDS)] for i in range(3)]
        costs += (here := project.train(run, faults))
        print(table(here), flush=True)
        check(*(p.folder / "results" / "runs" / run for p in (calm, project)), here)
    (tmp_path / "costs").write_text(table(costs))
