"""Adapters on a GPU: masks from a generator of their own, and norms that autocast makes fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from finetune.adapter import AddAdapter, draw, dropped, keep_mask
from finetune.modeling import compute_dtype, load_for_training

pytestmark = pytest.mark.gpu
SHARE = 0.25


@pytest.fixture
def given() -> list[torch.Tensor]:
    """A layer's output and input, and the adapter's matrices."""
    made = torch.Generator("cuda").manual_seed(0)
    sizes = ((2, 70, 96), (2, 70, 64), (8, 64), (96, 8))
    return [torch.randn(*s, generator=made, device="cuda").requires_grad_() for s in sizes]


def test_gradients_are_right_for_the_mask_that_was_drawn(given) -> None:
    out, x, a, b = given
    share, seed = draw(SHARE, x.device)
    assert (share, type(seed)) == (SHARE, int)
    mask = keep_mask(x, share, seed)
    assert mask.mean().item() == pytest.approx(1 - SHARE, abs=0.02)
    weights = torch.randn_like(out)
    torch.backends.cuda.matmul.allow_tf32 = False
    values = AddAdapter.apply(*given, share, seed, 0.7), out + 0.7 * dropped(x, mask) @ a.T @ b.T
    found, wanted = (torch.autograd.grad((y * weights).sum(), given) for y in values)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_masks_wait_for_no_device_and_leave_its_generator_alone(given) -> None:
    before = torch.cuda.get_rng_state()
    AddAdapter.apply(*given, *draw(SHARE, given[1].device), 1.0).sum().backward()  # cuBLAS starts
    torch.cuda.set_sync_debug_mode("error")
    try:
        AddAdapter.apply(*given, *draw(SHARE, given[1].device), 1.0).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_qlora_trains_a_model_with_layer_norms(tmp_path: Path) -> None:
    """GPT-NeoX: its norms are in front of 4-bit layers."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = GPTNeoXConfig(vocab_size=200, num_attention_heads=4, **sizes)
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    settings = {
        **{"method": "qlora", "launch": "ddp", "attention": None, "trust_remote_code": False},
        "quantization": {"type": "nf4", "double": True},
        "lora": {"rank": 4, "alpha": 8, "dropout": SHARE, "target_modules": "all-linear"},
    }
    model = load_for_training(tmp_path, settings, 0).train()
    ids = torch.randint(3, 200, (2, 17), device="cuda")
    with torch.autocast("cuda", compute_dtype()):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert gradients
    assert all(g.isfinite().all() and g.any() for g in gradients)
