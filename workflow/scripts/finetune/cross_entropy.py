"""The loss of a causal language model, with its logits as the only large tensor in memory.

transformers takes all logits to fp32; log-softmax keeps as much again, and its gradient takes as
much once more: 12 bytes for each logit of 2. Here a few rows at a time go through the same steps,
small enough for the cache of a core, and once more in the backward pass, which writes the gradient
of the logits in their own type. For 124 x 49152 of them on a core: 64 -> 15 ms.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from finetune.activations import CHUNK, CHUNK_ON_CPU
from finetune.encoding import IGNORED


def lose_in_chunks(model: torch.nn.Module) -> None:
    """From now on `model` computes its loss so, unless it has a loss of its own."""
    if model.loss_function is ForCausalLMLoss:
        model.loss_function = causal_loss
        # the Trainer asks; some that see images say no, of a loss that they had before
        model.accepts_loss_kwargs = True


def causal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    shift_labels: torch.Tensor | None = None,
    **more: Any,
) -> torch.Tensor:
    """transformers' ForCausalLMLoss for targets that are shifted already: nats, summed and divided
    by `num_items_in_batch`, or their mean."""
    if shift_labels is None:
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, **more)
    targets = shift_labels.reshape(-1).to(logits.device)
    total = TokenLosses.apply(logits.reshape(-1, vocab_size), targets).sum()
    if num_items_in_batch is None:
        return total / (targets != IGNORED).sum()
    return total / num_items_in_batch


class TokenLosses(torch.autograd.Function):
    """(tokens, vocabulary), (tokens,) -> (tokens,): negative log-likelihoods in fp32, 0 where the
    target is IGNORED."""

    @staticmethod
    def forward(ctx, logits, targets):
        ctx.save_for_backward(logits, targets)
        chunks = zip(*split(logits, targets), strict=True)
        losses = [F.cross_entropy(x.float(), t, reduction="none") for x, t in chunks]
        return torch.cat(losses)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        logits, targets = ctx.saved_tensors
        grad = grad.masked_fill(targets == IGNORED, 0.0)[:, None]
        targets = targets.clamp(min=0)[:, None]
        found = torch.empty_like(logits)
        for x, t, g, into in zip(*split(logits, targets, grad, found), strict=True):
            chunk = torch.softmax(x.float(), dim=-1).mul_(g)
            into.copy_(chunk.scatter_add_(1, t, -g))
        return found, None


def split(logits: torch.Tensor, *others: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    size = CHUNK_ON_CPU if logits.device.type == "cpu" else CHUNK
    rows = max(1, size // logits.shape[1])
    return [tensor.split(rows) for tensor in (logits, *others)]
