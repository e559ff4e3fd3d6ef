"""No test is timed; and the rule prepare_data, run on small files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pyarrow.parquet as pq
import pytest

import prepare_data
from finetune.config import Dataset
from finetune.splits import SPLITS
from finetune.stages import prepare_settings

hypothesis.settings.register_profile("patient", deadline=None)  # a busy machine is no fault
hypothesis.settings.load_profile("patient")

NO_SHARES = {"validation": 0, "test": 0}
HELD_OUT = {"prompt": "held out", "completion": "x"}


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Run the rule's script in an empty folder: (stats, rows of each split). Where no share is
    asked for, `held_out` is the test split: there has to be one."""
    monkeypatch.chdir(tmp_path)

    def run(source, split=NO_SHARES, threads=1, held_out=HELD_OUT, **keys):
        dataset = Dataset(source=source, split=split, **keys)
        settings = prepare_settings(dataset)
        if held_out and split.get("test") == 0:
            Path("held-out.jsonl").write_text(json.dumps(held_out))
            alone = {"path": "held-out.jsonl", "into": "test"}
            settings["source"] += prepare_settings(Dataset(source=alone))["source"]
        arguments = ["prepare_data.py", "--settings", json.dumps(settings)]
        arguments += ["--threads", str(threads)]
        arguments += ["--output", "out", "--rejects", "rejects.jsonl"]
        monkeypatch.setattr(sys, "argv", arguments)
        prepare_data.main()
        rows = {s: pq.read_table(f"out/{s}.parquet").to_pylist() for s in SPLITS}
        return json.loads(Path("out/stats.json").read_text()), rows

    return run
