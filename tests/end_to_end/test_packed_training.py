"""Two processes train on packed tokens: the losses of the rows, in fewer and fuller steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from finetune.packing import packed_batches
from finetune.tokens import open_tokens


@pytest.fixture(scope="module")
def folders(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same tokens as `rows` and as `packs`, an even number of either."""
    source, made = finished / "results/tokens/lights/tiny", {}
    tables = {s: even(open_tokens(source / s).data.table) for s in ("train", "validation")}
    for kind, convert in {"rows": lambda table: table.drop_columns("row"), "packs": pack}.items():
        made[kind] = tmp_path_factory.mktemp(kind)
        shutil.copy(source / "lint.json", made[kind])
        for split, table in tables.items():
            converted = convert(table)
            (made[kind] / split).mkdir()
            with pa.ipc.new_stream(made[kind] / split / "0.arrow", converted.schema) as writer:
                writer.write_table(converted)
    return made


def even(table: pa.Table) -> pa.Table:
    return table.slice(0, len(table) // 2 * 2)


def pack(table: pa.Table) -> pa.Table:
    """Two ranks take turns at packs, so there has to be an even number of them."""
    packed = (pa.Table.from_batches(packed_batches(table, size)) for size in range(120, 400, 10))
    return next(packs for packs in packed if len(packs) % 2 == 0)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_packed_rows_give_the_losses_of_the_rows(launch, folders) -> None:
    """A step of all rows, and a step of all packs: on two ranks that hold other rows each."""
    runs, sizes = {}, {}
    for kind, folder in folders.items():
        sizes[kind] = len(open_tokens(folder / "train"))
        code, output, runs[kind] = launch(
            2, 1, tokens=folder, global_batch=sizes[kind], launch="ddp"
        )
        assert code == 0, output[-3000:]
        record = json.loads((runs[kind] / "train.json").read_text())
        assert (record["world_size"], record["accumulation"]) == (2, sizes[kind] / 2)
    assert sizes["packs"] < sizes["rows"] / 2
    for name in ("loss", "grad_norm", "tokens", "supervised_share", "eval_loss"):
        expected, found = (
            [line[name] for line in lines(runs[kind]) if name in line] for kind in folders
        )
        assert found == pytest.approx(expected, rel=0.02), name  # bf16
        assert len(found) >= 2
