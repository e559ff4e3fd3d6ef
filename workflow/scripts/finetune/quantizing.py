"""bitsandbytes' 4-bit quantization on a CPU, five times as fast. Finite weights get its bits."""

from __future__ import annotations

import functools

import torch

PIECE = 1 << 18
"""Elements that are worked on at once: they stay near the core."""


@functools.cache
def quantize_quickly_on_cpu() -> None:
    """bitsandbytes 0.50 has no kernel of its own for this on a CPU, and its default takes most of
    the time of loading a model: it searches among the 15 limits between the 16 values for one
    element after the other. Comparing with all the limits takes vector instructions."""
    from bitsandbytes._ops import register_kernel

    register_kernel("bitsandbytes::quantize_4bit", "cpu")(quantize_4bit)


def quantize_4bit(
    weight: torch.Tensor, blocksize: int, quant_type: str, quant_storage: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two codes a byte, the first in the high bits, and the largest magnitude of each block."""
    from bitsandbytes.backends.default.ops import _get_4bit_quantize_bounds

    limits, order = _get_4bit_quantize_bounds(quant_type, weight.device)
    count = weight.numel()
    blocks = torch.nn.functional.pad(weight.reshape(-1), (0, -count % blocksize))
    pieces = blocks.view(-1, blocksize).split(max(1, PIECE // blocksize))
    found = [limits_below(piece.float(), limits.tolist()) for piece in pieces]
    codes = torch.cat([codes.view(-1) for codes, _ in found])[: count + count % 2]
    if quant_type != "nf4":
        codes = order[codes.int()].to(torch.uint8)
    packed = (codes[::2] << 4) | codes[1::2]
    return packed.view(quant_storage).unsqueeze(1), torch.cat([largest for _, largest in found])


def limits_below(blocks: torch.Tensor, limits: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """How many limits each value exceeds, as a share of its block's largest magnitude, in uint8;
    and those magnitudes."""
    largest = blocks.abs().amax(dim=-1)
    shares = (blocks * (1.0 / largest.clamp(min=1e-38)).unsqueeze(-1)).clamp_(-1, 1)
    above, count = torch.empty_like(shares), torch.zeros_like(shares)
    for limit in limits:
        count += torch.gt(shares, limit, out=above)  # to bool it would take four times as long
    return count.to(torch.uint8), largest
