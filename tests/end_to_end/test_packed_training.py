"""Two processes train on packed tokens: the losses of the rows, in fewer and fuller steps."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from finetune.packing import packed_batches
from finetune.tokens import open_tokens

CAPACITY = 240


@pytest.fixture(scope="module")
def packed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """A folder of packed tokens, its packs, and the rows in them."""
    folder, counts = tmp_path_factory.mktemp("packed"), {}
    for split in ("train", "validation"):
        rows = open_tokens(finished / "results/tokens/lights/tiny" / split)
        packs = pa.Table.from_batches(packed_batches(rows.data.table, CAPACITY))
        (folder / split).mkdir()
        with pa.ipc.new_stream(folder / split / "0.arrow", packs.schema) as writer:
            writer.write_table(packs)
        counts[split] = len(packs), len(rows)
    return folder, *counts["train"]


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_packed_rows_give_the_losses_of_the_rows(launch, packed) -> None:
    """A step of all rows, and a step of all packs: on two ranks that hold other rows each."""
    folder, packs, rows = packed
    assert packs % 2 == rows % 2 == 0
    assert packs < rows / 2
    code, output, alone = launch(2, 1, global_batch=rows, launch="ddp")
    assert code == 0, output[-3000:]
    code, output, together = launch(2, 1, tokens=folder, global_batch=packs, launch="ddp")
    assert code == 0, output[-3000:]
    for name in ("loss", "grad_norm", "tokens", "supervised_share", "eval_loss"):
        expected, found = (
            [line[name] for line in lines(run) if name in line] for run in (alone, together)
        )
        assert found == pytest.approx(expected, rel=0.02), name  # bf16
        assert len(found) >= 2
    for run in (alone, together):
        record = json.loads((run / "train.json").read_text())
        assert record["world_size"] == 2
    assert record["accumulation"] == packs / 2
