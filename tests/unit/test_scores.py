"""Batches and their loss: few logits, right targets, and padding that changes nothing."""

import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from finetune.collator import RowCollator
from finetune.encoding import IGNORED
from finetune.scores import batch_scores, row_scores
from finetune.tokens import digest_tokens, open_tokens
from project import tiny_tokenizer

VOCABULARY = 384
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(**GPT2, **NO_DROPOUT, bos_token_id=1, eos_token_id=2)
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)),
    # caps its logits after the head
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8, attn_implementation="eager")
    ),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().float().train()


def row(index, prompt, answer, middle=()):
    """Ids of a prompt, an answer, and maybe another prompt and answer."""
    ids = [*prompt, *answer, *middle]
    labels = [IGNORED] * len(prompt) + list(answer)
    labels += [IGNORED] * (len(middle) - 2) + list(middle[-2:]) if middle else []
    return {"id": f"r{index}", "input_ids": ids, "labels": labels, "length": len(ids), "row": index}


ROWS = [
    row(7, range(10, 19), [40, 41, 2]),
    row(3, [30], [31, 32, 33, 34, 2]),
    row(5, [50, 51, 52], [53, 2], middle=[60, 61, 62, 2]),
]


@pytest.fixture
def tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "right"
    return tokenizer


@pytest.fixture
def batch(tokenizer):
    return RowCollator(tokenizer)(ROWS)


def test_a_batch_is_padded_by_length(batch, tokenizer):
    assert batch["input_ids"].shape == (3, 12)
    assert batch["input_ids"][1].tolist() == [30, 31, 32, 33, 34, 2] + [tokenizer.pad_token_id] * 6
    assert batch["labels"][1].tolist() == [IGNORED, 31, 32, 33, 34, 2] + [IGNORED] * 6
    assert batch["attention_mask"].sum(1).tolist() == [12, 6, 9]
    assert batch["row"].tolist() == [7, 3, 5]


def test_a_batch_keeps_the_positions_before_supervised_tokens(batch):
    # row 3 at 0-4, row 5 at 2, 3, 6, 7, row 7 at 8-10
    assert batch["logits_to_keep"].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert batch["shift_labels"].tolist() == [
        [IGNORED] * 7 + [40, 41, 2],
        [31, 32, 33, 34, 2] + [IGNORED] * 5,
        [IGNORED, IGNORED, 53, 2, IGNORED, 62, 2, IGNORED, IGNORED, IGNORED],
    ]


def test_pad_that_equals_eos_masks_nothing_that_counts(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    batch = RowCollator(tokenizer)(ROWS)
    assert batch["attention_mask"].sum(1).tolist() == [12, 6, 9]
    assert (batch["shift_labels"] == tokenizer.eos_token_id).sum() == 4


def test_columns_that_no_model_takes_are_left_out(batch):
    assert sorted(batch) == [
        *("attention_mask", "input_ids", "labels", "logits_to_keep", "row", "shift_labels"),
    ]


def test_loss_and_gradients_are_those_of_all_logits(model, batch):
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask", "labels")}
    few = {k: batch[k] for k in ("logits_to_keep", "shift_labels")}
    losses, gradients = [], []
    for extra in ({}, few):
        model.zero_grad()
        output = model(**inputs, **extra)
        output.loss.backward()
        losses.append(output.loss.item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert output.logits.shape == (3, 10, VOCABULARY)
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-6, msg=name)
    assert sum(g.abs().sum() for g in gradients[0].values()) > 1


def test_the_trainers_token_count_scales_the_loss(model, batch):
    """The sum over tokens, divided by the count over ranks and accumulation steps."""
    batch.pop("row")
    mean = model(**batch).loss.item()
    assert model(**batch, num_items_in_batch=torch.tensor(48)).loss.item() == pytest.approx(
        mean * 12 / 48, abs=1e-6
    )


def test_row_scores_are_torchs_own_sums():
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 11)
    targets = torch.tensor(
        [[1, 2, 3, IGNORED, IGNORED], [IGNORED] * 5, [IGNORED, 4, IGNORED, 5, 6]]
    )
    logits[0, 1, 2] = 9.0  # two right
    logits[2, 4, 6] = 9.0
    scores = row_scores(logits, targets)
    each = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(scores[:, 0], each.sum(1))
    assert scores[:, 1].tolist() == [3, 0, 3]
    right = ((logits.argmax(-1) == targets) & (targets != IGNORED)).sum(1)
    assert scores[:, 2].tolist() == right.tolist()
    assert min(right[0], right[2]) >= 1
    assert scores.dtype is torch.float32


def test_row_scores_of_16_bit_logits_are_summed_in_32():
    logits = torch.zeros(1, 4096, 4, dtype=torch.bfloat16)
    scores = row_scores(logits, torch.zeros(1, 4096, dtype=torch.long))
    assert scores[0].tolist() == [pytest.approx(4096 * 1.3862944, rel=1e-4), 4096, 4096]


def test_batch_scores_are_the_models_loss(model, batch):
    scores, logits = batch_scores(model.eval(), batch)
    loss = model(**{k: batch[k] for k in ("input_ids", "attention_mask", "labels")}).loss
    nll, tokens, _ = scores.sum(0).tolist()
    assert tokens == 12
    assert nll / tokens == pytest.approx(loss.item(), abs=1e-6)
    assert logits.shape == (3, 10, VOCABULARY)


def test_padding_and_company_change_no_row(model, tokenizer, batch):
    collate = RowCollator(tokenizer)
    together = batch_scores(model.eval(), batch)[0]
    alone = torch.cat([batch_scores(model, collate([r]))[0] for r in ROWS])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-5)
    turned = batch_scores(model, collate(ROWS[::-1]))[0]
    torch.testing.assert_close(together, turned.flip(0), rtol=1e-6, atol=1e-5)


def test_token_folders_open_and_their_digest_is_their_contents(tmp_path):
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in ROWS]
    for name, some in {"a": rows, "same": rows, "other": rows[:2]}.items():
        (tmp_path / name).mkdir()
        for part, row in enumerate(some):
            table = pa.Table.from_pylist([row])
            with pa.ipc.new_stream(tmp_path / name / f"{part}.arrow", table.schema) as writer:
                writer.write_table(table)
    numbered = [row | {"row": number} for number, row in enumerate(rows)]
    assert open_tokens(tmp_path / "a").to_list() == numbered
    digests = {name: digest_tokens(tmp_path / name) for name in ("a", "same", "other")}
    assert digests["a"] == digests["same"] != digests["other"]
    assert len(digests["a"]) == 64
