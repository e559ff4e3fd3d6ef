"""Under ZeRO-3 each piece of the head's product gathers its weight: of ranks, all at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SHARDED = Path(__file__).resolve().parents[1] / "sharded.py"


def test_ranks_of_unequal_pieces_get_what_all_logits_at_once_give(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(SHARDED), str(tmp_path)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-3000:]
    for rank in range(2):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for wanted, found in (results[:2], results[2:]):  # two models
            assert [values.pop("pieces") for values in wanted] == [1, 1, 1]
            assert [values.pop("pieces") for values in found] == [2, 5, 5]  # never fewer again
            for at_once, in_pieces in zip(wanted, found, strict=True):
                assert len(at_once) > 20  # each parameter, the loss, the scores
                for name, values in at_once.items():
                    close = pytest.approx(flat(values), rel=1e-4, abs=1e-6)
                    assert flat(in_pieces[name]) == close, name


def flat(values: float | list) -> list[float]:
    if isinstance(values, list):
        return [number for value in values for number in flat(value)]
    return [values]
