"""The loss of transformers, and the gradient, without its fp32 copies of all logits."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from finetune import cross_entropy
from finetune.cross_entropy import causal_loss, lose_in_chunks
from finetune.encoding import IGNORED

VOCABULARY = 1000


def sample(dtype):
    numbers = torch.manual_seed(0)
    logits = (torch.randn(3, 7, VOCABULARY, generator=numbers) * 4).to(dtype)
    targets = torch.randint(0, VOCABULARY, (3, 7), generator=numbers)
    targets[0, :4] = targets[2, 6] = IGNORED
    return logits.requires_grad_(), targets


def both(dtype, scale=1.0, **more):
    """(loss, gradient of the logits) of ours, and of transformers'."""
    for loss_of in (causal_loss, ForCausalLMLoss):
        logits, targets = sample(dtype)
        loss = loss_of(logits, None, VOCABULARY, shift_labels=targets, **more)
        (loss * scale).backward()
        yield loss.detach(), logits.grad


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("items", [None, 40, torch.tensor(40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loss_and_gradient_are_those_of_transformers(monkeypatch, dtype, items, rows):
    monkeypatch.setattr(cross_entropy, "CHUNK_ON_CPU", rows * VOCABULARY)
    (loss, grad), (wanted, wanted_grad) = both(dtype, num_items_in_batch=items)
    torch.testing.assert_close(loss, wanted)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, wanted_grad)
    assert (grad[0, :4] == 0).all()


def test_a_scaled_loss_keeps_small_gradients_in_fp16():
    (_, grad), (_, wanted) = both(torch.float16, scale=2.0**16, num_items_in_batch=10_000)
    torch.testing.assert_close(grad, wanted)
    assert (grad != 0).sum() > 14 * VOCABULARY
    (_, unscaled), _ = both(torch.float16, num_items_in_batch=10_000)
    assert (unscaled != 0).sum() < 4 * VOCABULARY


def test_nothing_of_the_size_of_the_logits_is_kept_but_they():
    logits, targets = sample(torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda x: x):
        causal_loss(logits, None, VOCABULARY, shift_labels=targets)
    large = [one for one in kept if one.numel() >= logits.numel()]
    assert [one.data_ptr() for one in large] == [logits.data_ptr()]


def test_labels_that_are_not_shifted_are_transformers_own():
    logits, _ = sample(torch.float32)
    labels = torch.arange(21).view(3, 7)
    torch.testing.assert_close(
        causal_loss(logits, labels, VOCABULARY), ForCausalLMLoss(logits, labels, VOCABULARY)
    )


def test_a_model_with_a_loss_of_its_own_keeps_it():
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    lose_in_chunks(model)
    assert model.loss_function is causal_loss
    model.loss_function = own = lambda logits, labels, **more: logits.sum()
    lose_in_chunks(model)
    assert model.loss_function is own
