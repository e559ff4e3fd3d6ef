"""One rank of two under ZeRO-3, in which another number of tokens is supervised than in the other.

Writes, as JSON, what each batch gives with all logits at once and in pieces of two positions:
loss, gradients, the scores of a validation, and how many pieces there were.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workflow" / "scripts"))
from finetune import head
from finetune.scores import scores_in_pieces

COUNTS = [(1, 4), (9, 4), (3, 3)]
"""Supervised tokens of each batch, by rank."""
VOCABULARY, LENGTH, PIECE = 61, 12, 2 * 61
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
ZERO = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
}


def sharded(tied: bool, held: list) -> deepspeed.DeepSpeedEngine:
    """A Llama whose weights are cut among the ranks, its decoder's activations recomputed."""
    held.append(HfDeepSpeedConfig(ZERO))  # transformers keeps no more than a weak reference
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE, tie_word_embeddings=tied, use_cache=False)
    model = AutoModelForCausalLM.from_config(config)
    model.gradient_checkpointing_enable()
    head.lose_in_pieces(model)
    return deepspeed.initialize(model=model, config=ZERO, model_parameters=model.parameters())[0]


def batch(rank: int, counts: tuple[int, int]) -> dict:
    numbers = torch.Generator().manual_seed(rank)
    ids = torch.randint(1, VOCABULARY, (1, LENGTH), generator=numbers)
    kept = torch.arange(LENGTH - 1)[-counts[rank] :]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return inputs | {"logits_to_keep": kept, "shift_labels": ids[:, kept + 1].contiguous()}


def found(engine: deepspeed.DeepSpeedEngine, inputs: dict, items: int) -> dict:
    """Gradients by name, and the rest."""
    engine.train()
    loss = engine(**inputs, num_items_in_batch=torch.tensor(items)).loss
    engine.backward(loss)
    values = {n: safe_get_full_grad(p).tolist() for n, p in engine.module.named_parameters()}
    engine.step()
    engine.eval()
    with torch.no_grad():
        scores = scores_in_pieces(engine.module, inputs)
    made = head.most_pieces
    return values | {"loss": loss.item(), "scores": scores.tolist(), "pieces": made}


def main() -> None:
    deepspeed.init_distributed("gloo")
    rank, held, results = int(os.environ["RANK"]), [], []
    at_once = head.PIECE
    for tied in (False, True):
        engine, head.most_pieces = sharded(tied, held), 1
        for head.PIECE in (at_once, PIECE):
            results.append([found(engine, batch(rank, both), sum(both)) for both in COUNTS])
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    os._exit(0)  # as train.py leaves: DeepSpeed's threads may outlive the process group


if __name__ == "__main__":
    main()
