"""Memory that does not suffice, in earnest: torch is asked for more than there are addresses."""

import pytest
import torch

from finetune.cli import UserError
from finetune.halving import in_halves


def room_for(most: int):
    def work(rows: list[int]) -> list[int]:
        if len(rows) > most:
            torch.empty(2**50)
        return [10 * row for row in rows]

    return work


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(7, [7]), (6, [3, 4]), (3, [3, 2, 2]), (2, [1, 2, 2, 2]), (1, [1] * 7)],
)
def test_rows_are_halved_until_memory_suffices_and_none_is_lost(most, sizes):
    found = list(in_halves(room_for(most), [3, 1, 4, 15, 9, 2, 6]))
    assert [len(rows) for rows, _ in found] == sizes
    assert [row for rows, _ in found for row in rows] == [3, 1, 4, 15, 9, 2, 6]
    assert all(made == [10 * row for row in rows] for rows, made in found)


def test_what_one_row_has_no_memory_for_is_the_users_to_mend():
    with pytest.raises(
        UserError, match=r"one row: .*can't allocate memory.* Set max_length"
    ) as told:
        list(in_halves(room_for(0), [1, 2, 3]))
    assert str(told.value).endswith(
        "Or give the job more memory (on a cluster, mem_mb in the profile)."
    )


def test_more_gpus_are_advised_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"Or set evaluation\.gpus higher\.$"):
        list(in_halves(room_for(0), [1]))


def test_other_errors_pass_at_once():
    tried = []

    def work(rows: list[int]) -> None:
        tried.append(rows)
        raise RuntimeError("index out of range in self")

    with pytest.raises(RuntimeError, match="index out of range"):
        list(in_halves(work, [1, 2, 3, 4]))
    assert tried == [[1, 2, 3, 4]]
