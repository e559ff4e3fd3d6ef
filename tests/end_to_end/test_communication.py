"""Gradients cross between ranks once a step, however many micro-batches it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

COUNT = """
import json, os
if "RANK" in os.environ:
    from pathlib import Path
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel as DDP

    whole = DDP.__init__
    sent = []

    def hook(group, bucket):
        sent.append((bucket.is_last(), bucket.buffer().numel()))
        Path(os.environ["SENT"]).write_text(json.dumps(sent))
        return allreduce_hook(group, bucket)

    def counting(self, *args, **kwargs):
        whole(self, *args, **kwargs)
        self.register_comm_hook(None, hook if os.environ["RANK"] == "0" else allreduce_hook)

    DDP.__init__ = counting
"""


def test_accumulation_sends_gradients_once_a_step(
    launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(COUNT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SENT", str(tmp_path / "sent.json"))
    code, output, folder = launch(2, 1, launch="ddp")
    assert code == 0, output[-3000:]
    record = json.loads((folder / "train.json").read_text())
    sent = json.loads((tmp_path / "sent.json").read_text())
    assert (record["accumulation"], record["steps"]) == (2, 4)
    assert sum(last for last, _ in sent) == record["steps"]
    numbers = sum(size for _, size in sent)
    assert numbers == record["steps"] * record["placement"]["trainable_parameters"]
    assert record["attention"] == "eager"
