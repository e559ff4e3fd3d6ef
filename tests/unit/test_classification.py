"""Classifiers: their batches, heads, loss, and what does not depend on how a batch is split."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import (
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertModel,
    PrinterCallback,
    RobertaConfig,
    RobertaModel,
    TrainerCallback,
    TrainingArguments,
)

from classifiers import LABELLED, LABELS, labelled_rows, make_tiny_bert
from finetune.classification import (
    ClassificationTrainer,
    LabelCollator,
    class_lines,
    class_prior,
    class_scores,
    predict,
)
from finetune.cli import UserError
from finetune.guards import GradientGuard
from finetune.modeling import load_for_training
from finetune.tokenizer import load_tokenizer
from scarce import scarce_memory

FULL = {"method": "full", "launch": "ddp", "attention": None, "trust_remote_code": False}
LORA = FULL | {
    "method": "lora",
    "lora": {"rank": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear"},
}
HEAD = {"bert": ["classifier.weight", "classifier.bias"], "llama": ["score.weight"]}
TWELVE = LABELLED[22:34]
METHODS = pytest.mark.parametrize("settings", [FULL, LORA], ids=["full", "lora"])


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    make_tiny_bert(folder)
    return folder


@pytest.fixture(params=["bert", "llama"])
def kind(request):
    return request.param


@pytest.fixture
def base(kind, tiny_bert, tiny_model):
    """A model folder: an encoder, and a decoder with a head for text."""
    return {"bert": tiny_bert, "llama": tiny_model}[kind]


def load(folder, settings):
    torch.manual_seed(0)
    return load_for_training(folder, settings, 0, LABELS)


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def test_a_batch_is_padded_by_length(base):
    tokenizer = load_tokenizer(base)
    rows = labelled_rows(tokenizer)[::13]
    batch = LabelCollator(tokenizer)(rows)
    assert sorted(batch) == ["attention_mask", "input_ids", "labels", "row"]
    assert batch["labels"].tolist() == [row["labels"] for row in rows]
    assert (batch["labels"].dtype, batch["row"].tolist()) == (torch.int64, [0, 13, 26, 39])
    assert batch["attention_mask"].sum(1).tolist() == [row["length"] for row in rows]
    assert batch["input_ids"][0, rows[0]["length"] :].eq(tokenizer.pad_token_id).all()


def test_the_head_knows_the_classes_and_what_is_padding(base):
    config = load(base, FULL).config
    assert config.id2label == dict(enumerate(LABELS))
    assert config.label2id == {"off": 0, "on": 1, "question": 2}
    assert config.pad_token_id == load_tokenizer(base).pad_token_id


def test_full_trains_everything_in_fp32_under_ddp(base):
    model = load(base, FULL)
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.float32, True)}


def test_lora_trains_adapters_and_the_head_in_fp32(base, kind):
    model = load(base, LORA)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    whole = [name for name in trained if "lora_" not in name]
    assert whole == [
        f"base_model.model.{name.replace('.', '.modules_to_save.default.')}" for name in HEAD[kind]
    ]
    assert {p.dtype for p in trained.values()} == {torch.float32}
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}
    # 7 layers of each of 2 blocks; of BERT 6, and the pooler
    assert len(trained) - len(whole) == {"bert": 2 * (2 * 6 + 1), "llama": 2 * 2 * 7}[kind]
    assert model.peft_config["default"].task_type == "SEQ_CLS"


SMALL = {"vocab_size": 24, "max_position_embeddings": 64}
DISTILBERT = DistilBertConfig(**SMALL, dim=32, hidden_dim=32, n_heads=2, n_layers=1)
ROBERTA = RobertaConfig(
    **SMALL, hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1
)


@pytest.mark.parametrize(
    ("model", "new"),
    [
        (lambda: DistilBertModel(DISTILBERT), {"pre_classifier", "classifier"}),
        (lambda: RobertaModel(ROBERTA), {"classifier"}),
    ],
    ids=["distilbert", "roberta"],
)
def test_every_module_that_starts_at_random_is_trained_whole(tiny_bert, tmp_path, model, new):
    """A head of two layers too: peft itself knows of the last alone."""
    model().save_pretrained(tmp_path)
    load_tokenizer(tiny_bert).save_pretrained(tmp_path)
    adapted = load(tmp_path, LORA)
    assert set(adapted.peft_config["default"].modules_to_save) == new | {"classifier", "score"}
    trained = {n for n, p in adapted.named_parameters() if p.requires_grad and "lora" not in n}
    assert {name.split(".")[2] for name in trained} == new


def test_a_pooler_that_is_missing_is_new_too(tiny_bert, tmp_path):
    """Models that were trained to fill in words have none."""
    BertForMaskedLM.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    load_tokenizer(tiny_bert).save_pretrained(tmp_path)
    saved = set(load(tmp_path, LORA).peft_config["default"].modules_to_save)
    assert saved == {"bert.pooler.dense", "classifier", "score"}


@METHODS
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_trainable_tensor_gets_a_gradient(base, settings, checkpointing):
    """The pooler and the embeddings of token types included: GradientGuard stays silent."""
    model = load(base, settings)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    guard = GradientGuard(model)
    guard.on_train_begin()
    batch = LabelCollator(load_tokenizer(base))(labelled_rows(load_tokenizer(base))[::13])
    with torch.autocast("cpu", torch.bfloat16):
        class_scores(model.train(), batch)[0][:, 0].mean().backward()
    guard.on_step_end()
    assert guard.checks == 1


def test_a_head_that_is_not_used_is_found(tiny_bert):
    model = load(tiny_bert, FULL)
    guard = GradientGuard(model)
    guard.on_train_begin()
    batch = LabelCollator(load_tokenizer(tiny_bert))(labelled_rows(load_tokenizer(tiny_bert))[:2])
    model.bert(batch["input_ids"]).last_hidden_state.sum().backward()
    with pytest.raises(UserError, match=r"4 trainable tensors got no gradient \(first: bert.pool"):
        guard.on_step_end()


def test_scores_are_the_models_own_loss_and_hand_counted_hits(base):
    model, tokenizer = load(base, FULL).eval(), load_tokenizer(base)
    batch = LabelCollator(tokenizer)(labelled_rows(tokenizer)[::5])
    scores, logits = class_scores(model, batch)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    assert scores[:, 0].mean().item() == pytest.approx(model(**inputs).loss.item(), abs=1e-6)
    assert scores[:, 1].tolist() == [1.0] * 8
    assert scores[:, 2].tolist() == (logits.argmax(1) == batch["labels"]).float().tolist()


def test_padding_and_company_change_no_row(base):
    """A decoder must read the class at each row's last token, not at its padding."""
    model, tokenizer = load(base, FULL).eval(), load_tokenizer(base)
    rows, collate = labelled_rows(tokenizer)[::7], LabelCollator(tokenizer)
    together = class_scores(model, collate(rows))[0]
    alone = torch.cat([class_scores(model, collate([row]))[0] for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-5)


class Logs(TrainerCallback):
    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **_):
        self.lines.append({"step": state.global_step, **logs})


@pytest.fixture
def train(base, tmp_path):
    """train(settings, **arguments): a trainer in fp32, without dropout, that has run, and its log
    lines."""

    def train(settings, validation=(), broken=False, **changes):
        model = without_dropout(load(base, settings)).float()
        if broken:
            next(iter(model.parameters())).data[:] = math.nan
        options = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
        options |= {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "seed": 1}
        quiet = {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            save_strategy="no",
            remove_unused_columns=False,
            logging_nan_inf_filter=False,
            **quiet | options | changes,
        )
        tokenizer = load_tokenizer(base)
        trainer = ClassificationTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(labelled_rows(tokenizer, TWELVE)),
            eval_dataset=Dataset.from_list(list(validation)) if validation else None,
            data_collator=LabelCollator(tokenizer),
            processing_class=tokenizer,
        )
        trainer.add_callback(logs := Logs())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return trainer, logs.lines

    return train


def logged(lines, key):
    return [line[key] for line in lines if "loss" in line]


@METHODS
@pytest.mark.parametrize(("micro", "accumulation"), [(1, 4), (2, 2)])
def test_accumulation_changes_neither_loss_nor_gradient(train, settings, micro, accumulation):
    split = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    (_, whole), (_, parts) = train(settings), train(settings, **split)
    assert len(logged(whole, "loss")) == 3
    assert logged(whole, "loss")[0] == pytest.approx(math.log(3), abs=0.6)  # classes at random
    assert logged(parts, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-4)
    assert logged(parts, "grad_norm") == pytest.approx(logged(whole, "grad_norm"), rel=1e-3)


def test_tokens_are_counted_and_none_is_called_supervised(train, base):
    trainer, lines = train(FULL)  # 3 steps of 4 are all 12 rows
    total = sum(row["length"] for row in labelled_rows(load_tokenizer(base), TWELVE))
    assert trainer.total_tokens == total == logged(lines, "tokens")[-1]
    assert not any("supervised_share" in line for line in lines)
    assert all(value > 0 for value in logged(lines, "tokens_per_second"))


def test_validation_counts_each_row_once(train, base):
    """7 rows in batches of 4 and 3, of which the second would weigh more in a mean of means."""
    held_out = labelled_rows(load_tokenizer(base))[30:37]
    trainer, lines = train(FULL, validation=held_out, eval_strategy="steps", eval_steps=3)
    [line] = [line for line in lines if "eval_loss" in line]
    trainer.model.eval()
    batch = trainer.data_collator(held_out)
    with torch.no_grad():
        logits = class_scores(trainer.model, batch)[1]
    expected = F.cross_entropy(logits, batch["labels"]).item()
    assert line["eval_loss"] == pytest.approx(expected, abs=1e-5)
    right = (logits.argmax(1) == batch["labels"]).float().mean().item()
    assert line["eval_accuracy"] == pytest.approx(right)


def test_a_loss_that_is_no_number_names_the_rows(train):
    with pytest.raises(UserError, match=r"the loss is nan at step 1, rows r\d"):
        train(FULL, broken=True)


def test_the_class_prior_counts_each_class_once_more():
    """3, 0 and 6 rows: 4, 1 and 7 of 12."""
    prior = class_prior([3, 0, 6])
    assert np.exp(prior) == pytest.approx([4 / 12, 1 / 12, 7 / 12])


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_predictions_are_in_the_order_of_the_rows(base, batch_size):
    """They are made by length, and in batches."""
    model, tokenizer = load(base, FULL).eval(), load_tokenizer(base)
    rows = Dataset.from_list(labelled_rows(tokenizer)[::6])
    nats = predict(model, tokenizer, rows, batch_size)
    assert nats.shape == (7, 3)
    assert np.exp(nats).sum(1) == pytest.approx([1.0] * 7)
    for index in range(7):
        scores, _ = class_scores(model, LabelCollator(tokenizer)([rows[index]]))
        assert -nats[index, rows[index]["labels"]] == pytest.approx(scores[0, 0].item(), abs=1e-5)


def test_rows_that_memory_does_not_suffice_for_are_predicted_in_halves(base):
    model, tokenizer = load(base, FULL).eval(), load_tokenizer(base)
    rows = Dataset.from_list(labelled_rows(tokenizer)[::6])
    whole = predict(model, tokenizer, rows, 7)
    with scarce_memory(model, rows=2) as failures:
        assert predict(model, tokenizer, rows, 7) == pytest.approx(whole, abs=1e-5)
    assert failures == [7, 3, 4]


def test_a_prediction_is_the_likeliest_class_by_name(tmp_path):
    rows = {"id": ["x", "y", "z"], "text": ["1", "2", "3"], "label": ["on", "off", "on"]}
    pq.write_table(pa.table(rows), tmp_path / "test.parquet")
    nats = np.log([[0.125, 0.625, 0.25], [0.5, 0.25, 0.25]])
    assert class_lines(tmp_path / "test.parquet", ["z", "y"], LABELS, nats) == [
        {"id": "z", "text": "3", "reference": "on", "prediction": "on"}
        | {"probability": pytest.approx(0.625)},
        {"id": "y", "text": "2", "reference": "off", "prediction": "off"}
        | {"probability": pytest.approx(0.5)},
    ]
