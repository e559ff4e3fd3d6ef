"""FinetuneTrainer: whole batches, exact losses, every token counted."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from finetune.cli import UserError
from finetune.collator import RowCollator
from finetune.encoding import IGNORED
from finetune.modeling import load_for_training
from finetune.packing import packed_batches
from finetune.scores import batch_scores
from finetune.tokenizer import load_tokenizer
from finetune.trainer import FinetuneTrainer

FULL = {"method": "full", "launch": "ddp", "attention": None, "trust_remote_code": False}


def orders(rows, micro, accumulation, world_size, epochs=2, seed=3):
    """Per epoch, the global batches: rows of all ranks and accumulation steps of one step."""
    arguments = SimpleNamespace(
        train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        world_size=world_size,
        data_seed=seed,
    )
    trainer = SimpleNamespace(
        args=arguments,
        train_dataset={"length": [5 + row % 7 for row in range(rows)]},
        grouped=1,
        add_callback=lambda callback: None,
    )
    loaders = []
    for rank in range(world_size):
        sampler = FinetuneTrainer._get_train_sampler(trainer)
        loader = prepare_data_loader(  # as Accelerator.prepare() calls it for the Trainer
            DataLoader(range(rows), batch_size=micro, sampler=sampler),
            num_processes=world_size,
            process_index=rank,
            use_seedable_sampler=True,
            data_seed=seed,
            even_batches=True,
        )
        loaders.append(loader)
    found = []
    for epoch in range(epochs):
        for loader in loaders:
            loader.set_epoch(epoch)
        steps = [list(loader) for loader in loaders]
        assert len({len(s) for s in steps}) == 1
        rows_seen = torch.cat([torch.cat(parts) for parts in zip(*steps, strict=True)])
        assert len(rows_seen) % (micro * accumulation * world_size) == 0
        found.append(rows_seen.view(-1, micro * accumulation * world_size).tolist())
    return found


@pytest.mark.parametrize("rows", [8, 9, 11, 15, 16, 21])
@pytest.mark.parametrize(("micro", "accumulation", "world_size"), [(4, 1, 2), (2, 2, 2), (1, 4, 2)])
def test_an_epoch_is_whole_global_batches_of_each_row_at_most_once(
    rows, micro, accumulation, world_size
):
    for epoch in orders(rows, micro, accumulation, world_size):
        assert len(epoch) == rows // 8
        assert {len(batch) for batch in epoch} == {8}
        assert max(Counter(row for batch in epoch for row in batch).values()) == 1


@pytest.mark.parametrize("rows", [13, 16, 30])
def test_every_split_of_a_batch_sees_the_same_rows_in_the_same_order(rows):
    splits = [(4, 1, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]
    first, *others = [orders(rows, *split) for split in splits]
    for split, other in zip(splits[1:], others, strict=True):
        for ours, theirs in zip(first, other, strict=True):
            assert [sorted(b) for b in theirs] == [sorted(b) for b in ours], split


def test_epochs_and_seeds_have_orders_of_their_own():
    one, two = orders(16, 2, 2, 2, epochs=2)
    assert one != two
    assert {row for batch in one for row in batch} == set(range(16))
    assert orders(16, 2, 2, 2, seed=3)[0] == one
    assert orders(16, 2, 2, 2, seed=4)[0] != one


def test_rows_left_out_of_one_epoch_come_in_another():
    seen = {row for epoch in orders(11, 4, 1, 2, epochs=8) for batch in epoch for row in batch}
    assert seen == set(range(11))


class Logs(TrainerCallback):
    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **_):
        self.lines.append({"step": state.global_step, **logs})


def rows(count, start=0):
    """Rows of different lengths and shares of supervised tokens."""
    made = []
    for index in range(start, start + count):
        prompt, answer = [5 + index] * (2 + index % 3), [20 + index, 30 + index] * (1 + index % 4)
        ids = [*prompt, *answer, 2]
        labels = [IGNORED] * len(prompt) + ids[len(prompt) :]
        row = {"id": f"a.jsonl:{index}", "input_ids": ids, "labels": labels, "length": len(ids)}
        made.append(row | {"row": index - start})
    return made


@pytest.fixture
def train(tiny_model, tmp_path):
    """train(**arguments): a trainer in fp32 that has run, its model and its log lines."""

    def train(train_rows=None, validation=(), broken=False, flat=False, **changes):
        torch.manual_seed(0)
        model = load_for_training(tiny_model, FULL, 0)
        if broken:
            model.lm_head.weight.data[3, 0] = math.nan
        options = {
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "max_steps": 3,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "seed": 1,
        }
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            save_strategy="no",
            remove_unused_columns=False,
            logging_nan_inf_filter=False,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **options | changes,
        )
        tokenizer = load_tokenizer(tiny_model)
        trainer = FinetuneTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(train_rows or rows(12)),
            eval_dataset=Dataset.from_list(list(validation)) if validation else None,
            data_collator=RowCollator(tokenizer, "flash_attention_2" if flat else None),
            processing_class=tokenizer,
        )
        logs = Logs()
        trainer.add_callback(logs)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return trainer, logs.lines

    return train


def losses(lines):
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize(("micro", "accumulation"), [(1, 4), (2, 2)])
def test_accumulation_changes_neither_loss_nor_gradient(train, micro, accumulation):
    """Rows weigh by their supervised tokens, however they are split."""
    _, whole = train()
    _, split = train(per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation)
    assert losses(split) == pytest.approx(losses(whole), abs=1e-5)
    assert len(losses(whole)) == 3
    before, after = (
        [line["grad_norm"] for line in lines if "grad_norm" in line] for lines in (whole, split)
    )
    assert after == pytest.approx(before, rel=1e-4)


def test_validation_takes_rows_of_like_length_together_and_each_once(train):
    held_out = rows(9, start=40)
    trainer, _ = train(validation=held_out)
    batches = list(trainer.get_eval_dataloader())
    assert [len(batch["row"]) for batch in batches] == [4, 4, 1]
    seen = [row for batch in batches for row in batch["row"].tolist()]
    lengths = [held_out[row]["length"] for row in seen]
    assert sorted(seen) == list(range(9))
    assert lengths == sorted(lengths, reverse=True) != [row["length"] for row in held_out]


def packs(made, capacity=24):
    table = pa.Table.from_pylist(made)
    packed = [pack for batch in packed_batches(table, capacity) for pack in batch.to_pylist()]
    assert 1 < len(packed) < len(made) * 2 / 3
    return [pack | {"row": index} for index, pack in enumerate(packed)]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_packed_rows_train_as_the_rows_do(train, flat, whole):
    """Every step sees all rows: packed they give the same losses, gradients and counts."""
    held_out = rows(7, start=40)
    asked = {"eval_strategy": "steps", "eval_steps": 3}
    split = {"per_device_train_batch_size": 12}
    one, expected = train(validation=held_out, **split, **asked)
    packed = packs(rows(12))
    split = {"per_device_train_batch_size": len(packed) if whole else 1}
    split["gradient_accumulation_steps"] = 1 if whole else len(packed)
    two, found = train(packed, packs(held_out), flat=flat, **split, **asked)
    for name in ("loss", "grad_norm", "supervised_share", "eval_loss", "eval_token_accuracy"):
        values = [[line[name] for line in lines if name in line] for lines in (expected, found)]
        assert values[1] == pytest.approx(values[0], rel=1e-4), name
        assert values[0]
    assert two.total_tokens == one.total_tokens == 3 * sum(row["length"] for row in rows(12))


def shares(lines):
    return [line["padding_share"] for line in lines]


def test_every_token_is_counted_once(train):
    trainer, lines = train()  # 3 steps of 4 are all 12 rows
    total = sum(row["length"] for row in rows(12))
    supervised = sum(label != IGNORED for row in rows(12) for label in row["labels"])
    assert trainer.total_tokens == total
    logged = [line for line in lines if "loss" in line]
    assert logged[-1]["tokens"] == total
    seen = np.diff([0, *(line["tokens"] for line in logged)])
    assert seen @ [line["supervised_share"] for line in logged] == pytest.approx(supervised)
    assert all(line["tokens_per_second"] > 0 for line in logged)
    positions = sum(  # each step is one batch, padded to its longest row
        4 * max(rows(12)[index]["length"] for index in batch)
        for batch in np.array(list(trainer._get_train_sampler())).reshape(3, 4)
    )
    padding = [t * share / (1 - share) for t, share in zip(seen, shares(logged), strict=True)]
    assert sum(padding) == pytest.approx(positions - total)


@pytest.mark.parametrize(("every", "expected"), [(2, [2, 3]), (5, [3])])
def test_the_last_step_is_logged_and_counted_whatever_log_every_is(train, every, expected):
    trainer, lines = train(logging_steps=every)
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == expected
    assert trainer.total_tokens == sum(row["length"] for row in rows(12))
    assert trainer.training_seconds > 0
    total = np.diff([0, *steps]) @ losses(lines)
    assert total == pytest.approx(sum(losses(train()[1])), rel=1e-5)


def test_validation_loss_is_per_token_of_the_whole_split(train):
    """7 rows in batches of 4 and 3, of which the second would weigh more in a mean of means."""
    held_out = rows(7, start=40)
    trainer, lines = train(validation=held_out, eval_strategy="steps", eval_steps=3)
    [line] = [line for line in lines if "eval_loss" in line]
    trainer.model.eval()
    with torch.no_grad():
        each = [batch_scores(trainer.model, trainer.data_collator([row]))[0] for row in held_out]
    nll, tokens, correct = torch.cat(each).double().sum(0).tolist()
    assert tokens == sum(label != IGNORED for row in held_out for label in row["labels"])
    assert line["eval_loss"] == pytest.approx(nll / tokens, abs=1e-5)
    assert line["eval_token_accuracy"] == pytest.approx(correct / tokens)


def test_validation_is_no_training_time(train, monkeypatch):
    """A validation of a minute must not halve the tokens per second."""
    import finetune.trainer

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(finetune.trainer.time, "monotonic", lambda: clock.now)
    score, step = FinetuneTrainer.score, FinetuneTrainer.training_step

    def slow(seconds, method):
        def call(*args):
            clock.now += seconds
            return method(*args)

        return call

    monkeypatch.setattr(FinetuneTrainer, "score", slow(60, score))
    monkeypatch.setattr(FinetuneTrainer, "training_step", slow(2, step))
    trainer, _ = train(validation=rows(2), eval_strategy="steps", eval_steps=1)
    assert trainer.training_seconds == 3 * 2


def test_a_loss_that_is_no_number_stops_at_once_and_names_the_rows(train):
    with pytest.raises(UserError) as error:
        train(broken=True, train_rows=rows(4))
    text = str(error.value)
    assert text.startswith("the loss is nan at step 1, rows ")
    assert sorted(text.split("rows ")[1].split(". Look")[0].split(", ")) == [
        *("a.jsonl:0", "a.jsonl:1", "a.jsonl:2", "a.jsonl:3"),
    ]


def test_a_gradient_that_is_no_number_stops_before_the_weights_take_it(train, monkeypatch):
    """The loss is one: only the backward pass overflows. The rows of all micro-batches are named,
    and no line had to be logged."""
    seen = []

    def broken(self, model, inputs, num_items_in_batch=None):
        loss = step(self, model, inputs, num_items_in_batch)
        seen.append(model.lm_head.weight.detach().clone())
        if self.state.global_step == 1:
            model.lm_head.weight.grad[3, 0] = math.inf
        return loss

    step = FinetuneTrainer.training_step
    monkeypatch.setattr(FinetuneTrainer, "training_step", broken)
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    with pytest.raises(UserError) as error:
        train(train_rows=rows(4), logging_steps=100, **split)
    text = str(error.value)
    assert text.startswith("the gradient norm is inf at step 2, rows ")
    assert text.count("a.jsonl:") == 4
    assert len(seen) == 4
    assert seen[-1].isfinite().all()
