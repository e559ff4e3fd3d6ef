"""FlashAttention keeps packed samples apart in the flat batches that RowCollator makes for it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.collator import LIMITS, RowCollator
from finetune.encoding import IGNORED
from project import tiny_tokenizer

pytestmark = pytest.mark.gpu
SAMPLES = [[7, 1, 30], [12, 5], [40]]


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("flash_attn")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    model.set_attn_implementation("flash_attention_2")
    return model


def batch():
    """Packs of random tokens, laid end to end."""
    tokenizer = tiny_tokenizer()
    packs = []
    for index, lengths in enumerate(SAMPLES):
        ids = torch.randint(3, 200, (sum(lengths),), generator=torch.manual_seed(index)).tolist()
        pack = {"input_ids": ids, "labels": [IGNORED, *ids[1:]], "lengths": lengths, "row": index}
        packs.append(pack)
    return RowCollator(tokenizer, "flash_attention_2")(packs).to("cuda")


@torch.no_grad()
def farthest(model, ids, positions, **limits) -> float:
    """Largest difference of a packed sample's logits to those of the sample alone."""
    packed = model(input_ids=ids, position_ids=positions, use_cache=False, **limits).logits[0]
    sizes = [length for lengths in SAMPLES for length in lengths]
    parts = zip(packed.split(sizes), ids[0].split(sizes), strict=True)
    alone = [(part, model(input_ids=own[None], use_cache=False).logits[0]) for part, own in parts]
    return max((part - own).abs().max().item() / own.abs().max().item() for part, own in alone)


def test_no_sample_sees_another(model) -> None:
    given = batch()
    ids, limits = given["input_ids"], {name: given[name] for name in LIMITS}
    assert ids.shape == (1, 95)
    assert farthest(model, ids, given["position_ids"], **limits) < 0.03  # bf16
    running = torch.arange(95, device="cuda")[None]
    assert farthest(model, ids, running) > 0.1
    assert farthest(model, ids, running, **limits) < 0.03  # rotations tell distances alone
