"""LoRA's part of a layer as one step of the backward pass, in 16 bit.

peft takes the input of an adapter to fp32 (on a CPU always; its question whether autocast is on
speaks of CUDA), draws its dropout as fp32 numbers, and adds up two outputs, each step with its own
record for the backward pass. Here a layer keeps its input, which its neighbours share, the rank-r
product, and the seed of its mask. With W the weight, A and B the adapter, s its scale, m the
mask and x a row:  y = W x + s B A (m x)  (Hu et al. 2021, arXiv 2106.09685, section 4.1).

A mask is made twice from its seed, in the forward and in the backward pass. A GPU makes it in one
kernel, by a generator of its own that starts there. SplitMix64 takes fifteen, which move four times
the bytes; but it makes eight elements of a number. That is faster on a CPU, where drawing a number
for each takes a tenth of a step, and it is what compiled code can do, which has no generators, and
fuses the fifteen.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.lora.bnb import Linear4bit
from peft.tuners.lora.layer import LoraLayer
from torch.autograd.function import once_differentiable

Seed = torch.Tensor | int
"""Of a mask. A generator takes an int, SplitMix64 a tensor."""
LEVELS = 256
"""In which one byte tells shares of dropout apart."""
MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def lean(model: torch.nn.Module) -> None:
    """Let the plain LoRA layers of a peft model train that way. Their parameters, what is saved,
    and what they do outside training stay peft's."""
    for module in model.modules():
        if type(module) in LEAN and is_plain(module):
            module.__class__ = LEAN[type(module)]


def is_plain(layer: LoraLayer) -> bool:
    """One adapter, of two matrices without bias."""
    names = layer.active_adapters
    return len(names) == 1 and not layer.lora_variant and not layer.lora_bias[names[0]]


class LeanForward:
    """Before one of peft's layers in the order of base classes."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """(…, in features) -> (…, out features)."""
        if not self.training or self.disable_adapters or self.merged or args or kwargs:
            return super().forward(x, *args, **kwargs)
        [name] = self.active_adapters
        out = self.base_layer(x)
        asked = getattr(self.lora_dropout[name], "p", 0.0)  # or Identity
        share, seed = draw(asked, x.device) if asked else (0.0, None)
        matrices = self.lora_A[name].weight, self.lora_B[name].weight
        return AddAdapter.apply(out, x, *matrices, share, seed, self.scaling[name] / (1 - share))


class LeanLinear(LeanForward, lora.Linear):
    """Over a 16-bit layer."""


class LeanLinear4bit(LeanForward, Linear4bit):
    """Over a 4-bit layer."""


LEAN = {lora.Linear: LeanLinear, Linear4bit: LeanLinear4bit}


def draw(asked: float, device: torch.device) -> tuple[float, Seed]:
    """The share that dropout drops, and the seed of its mask from torch's own generators, which
    checkpoints hold. Nothing waits for the device."""
    numbers = {"low": -(2**63), "high": 2**63 - 1, "size": (), "dtype": torch.int64}
    if takes_generators(device):
        return asked, torch.randint(**numbers, device="cpu").item()
    # some where some was asked for, and never all
    share = min(max(1, round(asked * LEVELS)), LEVELS - 1) / LEVELS
    return share, torch.randint(**numbers, device=device)


def takes_generators(device: torch.device) -> bool:
    """Where masks are made by one of torch's, of an int, and not by SplitMix64."""
    return device.type != "cpu" and not torch.compiler.is_compiling()


def keep_mask(x: torch.Tensor, share: float, seed: Seed) -> torch.Tensor:
    """What dropout keeps of x, for `dropped`: the same for the same seed. Ones and zeros in the
    type of x, which a GPU multiplies by fastest, or bytes of all bits or none."""
    if isinstance(seed, int):
        generator = torch.Generator(x.device).manual_seed(seed)
        drawn = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return drawn.bernoulli_(1 - share, generator=generator)
    return bytes_to_keep(x.shape, share, seed)


def bytes_to_keep(shape: torch.Size, share: float, seed: torch.Tensor) -> torch.Tensor:
    """All bits set but for the `share`, in steps of 1/256.

    Comparing bytes takes as long as drawing them; limits, which need no result of another type, a
    tenth of that.
    """
    above = LEVELS // 2 - round(share * LEVELS)  # from here on a byte, of -128 to 127, is dropped
    count = shape.numel()
    drawn = random_words((count + 7) // 8, seed).view(torch.int8)[:count]
    return drawn.clamp_(above - 1, above).sub_(above).view(shape)


def random_words(count: int, seed: torch.Tensor) -> torch.Tensor:
    """The first numbers of SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number
    generators", figure 17)."""
    golden, first, second = (number - 2**64 for number in MIX)  # as signed numbers
    words = torch.arange(1, count + 1, dtype=torch.int64, device=seed.device)
    words.mul_(golden).add_(seed)
    words.bitwise_xor_(shifted(words, 30)).mul_(first)
    words.bitwise_xor_(shifted(words, 27)).mul_(second)
    return words.bitwise_xor_(shifted(words, 31))


def shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros on the left: torch repeats the sign."""
    return (words >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def dropped(rows: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """Rows times a mask. By their bits it is several times faster on a CPU than the product."""
    if keep is None:
        return rows
    if keep.dtype is rows.dtype:
        return rows * keep
    bits = {2: torch.int16, 4: torch.int32}[rows.element_size()]
    return keep.to(bits).bitwise_and_(rows.view(bits)).view(rows.dtype)


def compute_type(out: torch.Tensor) -> torch.dtype:
    """Of autocast where it is on: on a GPU it makes norms fp32, and with them x and, over 4 bit,
    `out`. Else the type of `out`."""
    device = out.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else out.dtype


class AddAdapter(torch.autograd.Function):
    """out + scale * (mask * x) A^T B^T, in the type of `out`. The mask is made from its share and
    seed, and again in the backward pass, in which no autocast is on: all is in one type."""

    @staticmethod
    def forward(ctx, out, x, a, b, share, seed, scale):
        kind = compute_type(out)
        x, a, b = x.to(kind), a.to(kind), b.to(kind)
        mask = keep_mask(x, share, seed) if share else None
        inner = dropped(x, mask) @ a.T
        ctx.save_for_backward(x, a, b, inner, seed if isinstance(seed, torch.Tensor) else None)
        ctx.seed = seed if isinstance(seed, int) else None
        ctx.share, ctx.scale = share, scale
        flat = out.flatten(0, -2).to(kind), inner.flatten(0, -2)
        return torch.addmm(*flat, b.T, alpha=scale).view(out.shape).to(out.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, a, b, inner, seed = ctx.saved_tensors
        seed = ctx.seed if seed is None else seed
        mask = keep_mask(x, ctx.share, seed) if ctx.share else None
        rows = grad.flatten(0, -2).to(b.dtype)
        grad_inner = (rows @ b) * ctx.scale
        grad_b = (rows.T @ inner.flatten(0, -2)) * ctx.scale
        grad_a = grad_inner.T @ dropped(x, mask).flatten(0, -2)
        grad_x = None
        if ctx.needs_input_grad[1]:
            grad_x = dropped((grad_inner @ a).view(x.shape), mask)
        return grad, grad_x, grad_a.float(), grad_b.float(), None, None, None
