"""The head and its loss in pieces, so that a long vocabulary never sets the peak of memory.

Logits are positions x vocabulary, in 16 bit, and once more for their gradient (`cross_entropy`).
For 8192 tokens of a vocabulary of 256,000 that is 8 GB. A piece of the positions at a time
keeps one piece of them; in the backward pass each is computed again (Chen et al. 2016, "Training
deep nets with sublinear memory cost", arXiv 1604.06174). That costs one more product with the head.

The model's own forward makes every piece, head, soft-capping, scaling and loss, with its decoder
held to the states that it made the first time: so it is exact for each family.
torch's linear_cross_entropy and Liger take the head's weight instead, and know nothing of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from finetune.activations import PIECE
from finetune.cross_entropy import lose_in_chunks
from finetune.encoding import IGNORED

most_pieces = 1
"""That a batch of this process was cut into so far, under ZeRO-3."""


class Held(torch.nn.Module):
    """A decoder that runs once and then repeats what it said."""

    def __init__(self, decoder: torch.nn.Module, said: Any = None) -> None:
        super().__init__()
        self.decoder, self.said = decoder, said

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.said is None:
            self.said = self.decoder(*args, **kwargs)
        return self.said

    def __getattr__(self, name: str) -> Any:
        """Falcon-H1 keeps its head's multiplier in the decoder."""
        own = self._modules
        return own[name] if name in own else getattr(own["decoder"], name)


def parent_of_decoder(model: PreTrainedModel) -> tuple[torch.nn.Module, str]:
    """Whose child the decoder is that `model` calls, and by which name."""
    base = model._modules.get(model.base_model_prefix)
    if base is not None and "decoder" in base._modules:  # OPT, and BART without its encoder
        return base, "decoder"
    return model, model.base_model_prefix


@contextmanager
def held(model: PreTrainedModel, said: Any = None) -> Iterator[Held | None]:
    """Within, the decoder of `model` is a Held one."""
    parent, name = parent_of_decoder(model)
    decoder = parent._modules.get(name)
    if decoder is None:  # pieces() makes one of its batches
        yield None
        return
    parent._modules[name] = holder = Held(decoder, said)
    try:
        yield holder
    finally:
        parent._modules[name] = decoder


def pieces(model: PreTrainedModel, batch: Mapping) -> list[dict[str, torch.Tensor]]:
    """`logits_to_keep` and `shift_labels` of each piece. One, where the model cannot be held, or
    adds a loss of its routers, which would count once a piece."""
    kept, labels = batch["logits_to_keep"], batch["shift_labels"]
    config = model.config.get_text_config()
    size = max(1, PIECE // (len(batch["input_ids"]) * config.vocab_size))
    if getattr(config, "output_router_logits", False) or (
        model.base_model_prefix not in model._modules
    ):
        count = 1
    else:
        count = agreed(max(1, math.ceil(len(kept) / size)), kept.device)
    cut = zip(kept.tensor_split(count), labels.tensor_split(count, dim=1), strict=True)
    return [{"logits_to_keep": one, "shift_labels": other.contiguous()} for one, other in cut]


def agreed(count: int, device: torch.device) -> int:
    """The pieces of this batch, of which a rank needs `count`. Under ZeRO-3 each of them gathers
    the head from all ranks: so all make as many as the one that needs most, some of them empty.

    And never fewer than before: as long as a step calls the same modules as the last, DeepSpeed
    fetches weights ahead and keeps the head from one piece to the next; when the count goes up and
    down, each piece gathers it anew. Gathering it around all pieces (GatheredParameters) would not
    do: DeepSpeed lets go of it after the first, and the backward pass comes later.
    """
    global most_pieces
    if not is_deepspeed_zero3_enabled():
        return count
    most = torch.tensor(max(count, most_pieces), device=device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    most_pieces = most.item()
    return most_pieces


def lose_in_pieces(model: PreTrainedModel) -> None:
    """From now on `model` computes its loss so, where a batch of RowCollator needs it."""
    lose_in_chunks(model)
    whole = model.forward

    @wraps(whole)
    def forward(*args: Any, **inputs: Any) -> Any:
        if not model.training or "shift_labels" not in inputs:
            return whole(*args, **inputs)
        first, *rest = pieces(model, inputs)
        if rest and inputs.get("num_items_in_batch") is None:
            inputs["num_items_in_batch"] = (inputs["shift_labels"] != IGNORED).sum()

        def loss(part: dict, said: Any) -> torch.Tensor:
            with held(model, said):
                return whole(*args, **inputs | part).loss

        with held(model) as holder:
            outputs = whole(*args, **inputs | first)
        for part in rest:
            outputs.loss = outputs.loss + checkpoint(loss, part, holder.said, use_reentrant=False)
        # nobody needs them, and accelerate would take them to fp32; the attribute leaves the item
        outputs["logits"] = None
        return outputs

    model.forward = forward
