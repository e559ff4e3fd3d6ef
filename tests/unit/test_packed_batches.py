"""Packed rows give the logits, losses and gradients of the rows alone, in every form of batch."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from finetune.collator import LIMITS, RowCollator
from finetune.encoding import IGNORED
from finetune.packing import packed_batches
from finetune.scores import batch_scores
from project import tiny_tokenizer

CAPACITY = 20
LENGTHS = [7, 1, 12, 5, 3, 9, 14, 2, 4]
SIZES = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": {"intermediate_size": 64, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {"max_position_embeddings": 32}
    | {f"{n}_pdrop": 0.0 for n in ("attn", "embd", "resid")},
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def rows():
    draw, made = np.random.default_rng(0), []
    for index, length in enumerate(LENGTHS):
        ids = draw.integers(3, 200, length).tolist()
        labels = [t if i >= length // 3 else IGNORED for i, t in enumerate(ids)]
        row = {"id": f"r{index}", "input_ids": ids, "labels": labels, "length": length}
        made.append(row | {"row": index})
    return made


def packs():
    table = pa.Table.from_pylist(rows())
    packed = [pack for batch in packed_batches(table, CAPACITY) for pack in batch.to_pylist()]
    assert len(packed) < len(LENGTHS) / 2
    assert len({pack["length"] for pack in packed}) > 1  # some are padded
    return [pack | {"row": index} for index, pack in enumerate(packed)]


@pytest.fixture
def collate():
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "right"
    return RowCollator(tokenizer)


@pytest.fixture
def flat_collate(collate):
    return RowCollator(collate.tokenizer, "flash_attention_2")


@pytest.fixture(params=[(name, a) for name in MODELS for a in ("eager", "sdpa")], ids="-".join)
def model(request):
    name, attention = request.param
    config = CONFIG_MAPPING[name](**SIZES, **MODELS[name], **SPECIAL)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in made.parameters():  # fresh weights are so small that nothing would show
        parameter.data.mul_(3)
    return made


def sample_logits(model, batch):
    """id -> logits of that sample; `batch` is of all packs, in either form."""
    given = {n: batch[n] for n in ("input_ids", "attention_mask", "position_ids") if n in batch}
    logits = model(**given, use_cache=batch["use_cache"]).logits
    if len(logits) == 1:
        logits = logits[0].split([pack["length"] for pack in packs()])
    found = {}
    for row, pack in zip(logits, packs(), strict=True):
        parts = row[: pack["length"]].split(pack["lengths"])
        found |= dict(zip(pack["id"].split(", "), parts, strict=True))
    return found


def alone(model, row):
    return model(input_ids=torch.tensor([row["input_ids"]])).logits[0]


def farthest(model, batch):
    found = sample_logits(model, batch)
    assert len(found) == len(LENGTHS)
    return max((found[row["id"]] - alone(model, row)).abs().max().item() for row in rows())


@torch.no_grad()
def test_no_sample_sees_another(model, collate, flat_collate):
    assert farthest(model, collate(packs())) < 1e-4
    flat = flat_collate(packs())
    assert flat["input_ids"].shape == (1, sum(LENGTHS))
    assert farthest(model, flat) < 1e-4


@torch.no_grad()
def test_the_comparison_sees_samples_that_read_each_other(model, collate):
    masked = collate(packs())
    masked["attention_mask"] = torch.ones_like(masked["input_ids"])
    assert farthest(model, masked) > 1e-2
    running = collate(packs())
    running["position_ids"] = torch.arange(CAPACITY).expand(len(packs()), -1)
    assert farthest(model, running) > 1e-2
    cached = collate(packs())
    cached["use_cache"] = True
    assert farthest(model, cached) > 1e-2


def gradients(model, batch):
    """Of the loss as the Trainer takes it: the sum over tokens, by the tokens of a step."""
    model.zero_grad()
    unused = ("row", "tokens", "row_of_position")
    inputs = {name: value for name, value in batch.items() if name not in unused}
    items = (batch["shift_labels"] != IGNORED).sum()
    loss = model(**inputs, num_items_in_batch=items).loss
    loss.backward()
    return loss.item(), items.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("form", ["collate", "flat_collate"])
def test_loss_and_gradients_are_those_of_the_rows(model, collate, form, request):
    loss, items, expected = gradients(model.train(), collate(rows()))
    packed_loss, packed_items, found = gradients(model, request.getfixturevalue(form)(packs()))
    assert packed_items == items
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    assert sum(g.abs().sum() for g in expected.values()) > 1
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("form", ["collate", "flat_collate"])
def test_scores_are_of_each_pack(model, collate, form, request):
    """One line per pack, also of packs laid end to end: ranks gather lines of the same rows."""
    each = dict(
        zip((r["id"] for r in rows()), batch_scores(model, collate(rows()))[0], strict=True)
    )
    expected = torch.stack([sum(each[name] for name in p["id"].split(", ")) for p in packs()])
    scores, logits = batch_scores(model, request.getfixturevalue(form)(packs()))
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    assert len(logits) == (1 if form == "flat_collate" else len(packs()))


def test_scoring_hands_on_where_samples_end(flat_collate):
    """In validation, as the Trainer does in training, which hands on all that a batch holds."""
    seen = {}

    class Spy(torch.nn.Module):
        def forward(self, **given):
            seen.update(given)
            return SimpleNamespace(logits=torch.zeros(1, len(given["logits_to_keep"]), 9))

    batch_scores(Spy(), flat_collate([p | {"labels": [3] * p["length"]} for p in packs()]))
    assert set(LIMITS) <= set(seen)


def test_padding_is_a_sample_of_its_own(collate):
    short = {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7], "lengths": [2, 1], "row": 4}
    long = {"input_ids": [5] * 6, "labels": [IGNORED] * 6, "lengths": [6], "row": 9}
    batch = collate([short, long])
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert batch["tokens"] == 9
    assert "attention_mask" not in batch
    assert batch["use_cache"] is False
    assert batch["row"].tolist() == [4, 9]


def test_flat_batches_hold_no_padding_and_know_their_rows(flat_collate):
    one = {"input_ids": [5, 6, 7], "labels": [IGNORED, 6, IGNORED], "lengths": [2, 1], "row": 4}
    two = {"input_ids": [8, 9], "labels": [IGNORED, 9], "lengths": [2], "row": 9}
    batch = flat_collate([one, two])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1]]
    assert batch["logits_to_keep"].tolist() == [0, 3]
    assert batch["shift_labels"].tolist() == [[6, 9]]
    assert batch["row_of_position"].tolist() == [0, 0, 0, 1, 1]
    assert batch["row"].tolist() == [4, 9]
    assert batch["tokens"] == 5
    for side in "qk":  # what FlashAttention would else ask the device for, in each layer
        assert batch[f"cu_seq_lens_{side}"].tolist() == [0, 2, 3, 5]
        assert batch[f"cu_seq_lens_{side}"].dtype is torch.int32
        assert (batch[f"max_length_{side}"], type(batch[f"max_length_{side}"])) == (2, int)


def test_rows_that_are_no_packs_are_padded_as_ever(collate, flat_collate):
    for form in (collate, flat_collate):
        batch = form(rows())
        assert batch["attention_mask"].sum() == sum(LENGTHS)
        assert not {"position_ids", "tokens", "use_cache", "row_of_position"} & set(batch)
        assert not set(LIMITS) & set(batch)
