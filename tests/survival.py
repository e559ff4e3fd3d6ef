"""A launch of a small run that tests disturb: signals, kills, and faults put into its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

SCRIPTS = Path(__file__).resolve().parents[1] / "workflow" / "scripts"
FILES = {
    "output": "trained",
    "metrics": "metrics.jsonl",
    "record": "train.json",
    "calibration": "calibration.jsonl",
}
STEPS = 10
"""Over one epoch of the small project and into the next."""
EVERY_STEP = {"checkpoint_minutes": 1e-9}

HOOK = """
import importlib.abc, importlib.util, os, sys, time

{code}

class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "finetune.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            trainer, rank = module.FinetuneTrainer, int(os.environ["RANK"])
            step = trainer.training_step

            def training_step(self, *args, **kwargs):
                fault(self, rank, self.state.global_step + 1)
                return step(self, *args, **kwargs)

            trainer.training_step = training_step

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hook())
"""


class Job:
    """One run folder, launched as often as a test likes, on the tokens of a finished project."""

    def __init__(
        self,
        finished: Path,
        folder: Path,
        run: str = "tiny-qlora",
        log_every: int = 3,  # so that a stop falls between two lines
        **plan: object,
    ) -> None:
        self.base, self.folder, self.run = finished / "results", folder, run
        folder.mkdir(exist_ok=True)
        made = json.loads((self.base / "runs" / run / "plan.json").read_text())
        self.settings = yaml.safe_load((self.base / "runs" / run / "train.yaml").read_text())
        self.settings["log_every"] = log_every
        self.plan = made | {"steps": STEPS} | plan
        self.state = folder / "checkpoints"

    def with_settings(self, **settings: object) -> Job:
        """Keys of the run that plan.json carries: when to save, when to give up."""
        self.plan["settings"] |= settings
        return self

    def start(
        self, gpus: int = 2, threads: int = 2, fault: str = "", **env: str
    ) -> subprocess.Popen:
        """`fault` is the body of fault(self, rank, step), called before each training step."""
        (self.folder / "plan.json").write_text(json.dumps(self.plan))
        command = [sys.executable, str(SCRIPTS / "launch.py")]
        command += ["--settings", json.dumps(self.settings)]
        command += ["--gpus", str(gpus), "--threads", str(threads)]
        command += ["--plan", str(self.folder / "plan.json")]
        command += ["--config", str(self.folder / "train.yaml")]
        command += ["--tokens", str(self.base / "tokens/lights/tiny")]
        command += ["--model", str(self.base / "models/tiny/pretrained")]
        for option, name in FILES.items():
            command += [f"--{option}", str(self.folder / name)]
        self.log = self.folder / "log"
        with open(self.log, "w") as log, open(self.folder / "said", "w") as said:
            self.process = subprocess.Popen(
                command, stdout=said, stderr=log, cwd=self.folder, env=self.with_hook(fault) | env
            )
        return self.process

    def with_hook(self, fault: str) -> dict[str, str]:
        if not fault:
            return dict(os.environ)
        hooks = self.folder / "hooks"
        hooks.mkdir(exist_ok=True)
        body = "".join(f"    {line}\n" for line in fault.strip().splitlines())
        code = f"def fault(self, rank, step):\n{body}"
        (hooks / "sitecustomize.py").write_text(HOOK.format(code=code))
        return os.environ | {"PYTHONPATH": str(hooks)}

    def finish(self, **options: object) -> int:
        self.start(**options)
        return self.process.wait(timeout=300)

    def wait_for_step(self, step: int) -> None:
        """Until this step is logged."""
        while not any(line["step"] >= step for line in self.lines()):
            assert self.process.poll() is None, self.said()
            time.sleep(0.02)

    def lines(self) -> list[dict]:
        """Of metrics.jsonl, finished or not."""
        done, partial = self.folder / "metrics.jsonl", self.state / "metrics.jsonl"
        path = done if done.exists() else partial
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def losses(self) -> list[tuple]:
        """What must be the same in a run that was disturbed: all but speed."""
        names = ("step", "loss", "grad_norm", "learning_rate", "tokens", "eval_loss", "train_loss")
        return [tuple(line.get(name) for name in names) for line in self.lines()]

    def weights(self) -> dict[str, bytes]:
        files = sorted((self.folder / "trained").glob("*.safetensors"))
        assert files
        return {path.name: path.read_bytes() for path in files}

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def record(self) -> dict:
        return json.loads((self.folder / "train.json").read_text())

    def events(self) -> list[str]:
        path = self.state / "history.json"
        events = json.loads(path.read_text()) if path.exists() else self.record()["events"]
        return [event["event"] for event in events]

    def checkpoints(self) -> list[int]:
        return sorted(int(p.name.split("-")[1]) for p in self.state.glob("checkpoint-*"))

    def processes(self) -> list[psutil.Process]:
        """Launcher, agent and ranks."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        return [p for p in self.processes() if "RANK" in p.environ()]
