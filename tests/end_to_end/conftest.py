"""Training by itself: launch.py on the tokens of a finished project."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from survival import FILES, Job

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"


@pytest.fixture(scope="session")
def launch(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """launch(gpus, micro, tokens, global_batch, planned, **settings) -> (code, output, folder)."""

    def run(
        gpus: int,
        micro: int,
        tokens: Path | None = None,
        global_batch: int = 4,
        planned: dict | None = None,
        **changes: object,
    ) -> tuple[int, str, Path]:
        folder = tmp_path_factory.mktemp("run")
        base = finished / "results"
        settings = json.loads(frozen(base / "runs/tiny-full/train.yaml")) | changes
        plan = json.loads((base / "runs/tiny-full/plan.json").read_text())
        plan |= {"world_size": gpus, "micro_batch": micro, "global_batch": global_batch}
        plan["settings"] |= planned or {}
        (folder / "plan.json").write_text(json.dumps(plan))
        command = [sys.executable, str(SCRIPTS / "launch.py"), "--settings", json.dumps(settings)]
        command += ["--gpus", str(gpus), "--threads", "2", "--plan", str(folder / "plan.json")]
        command += ["--config", str(folder / "train.yaml")]
        command += ["--tokens", str(tokens or base / "tokens/lights/tiny")]
        command += ["--model", str(base / "models/tiny/pretrained")]
        for option, name in FILES.items():
            command += [f"--{option}", str(folder / name)]
        done = subprocess.run(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder
        )
        return done.returncode, done.stdout, folder

    return run


def frozen(path: Path) -> str:
    import yaml

    return json.dumps(yaml.safe_load(path.read_text()))


@pytest.fixture(scope="session")
def undisturbed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """undisturbed(run): that run, from its beginning to its end at once."""
    made: dict[str, Job] = {}

    def run(name: str) -> Job:
        if name not in made:
            job = Job(finished, tmp_path_factory.mktemp("undisturbed"), name)
            assert job.finish() == 0, job.log.read_text()[-3000:]
            made[name] = job
        return made[name]

    return run
