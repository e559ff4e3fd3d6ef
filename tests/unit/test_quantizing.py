"""4-bit codes from a CPU: bitsandbytes' own, to the bit."""

import pytest
import torch
from bitsandbytes.backends.default.ops import _get_4bit_quantize_bounds

from finetune.modeling import quantization
from finetune.quantizing import PIECE

DEFAULT = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
"""Where bitsandbytes keeps the kernel for devices that have none of their own."""


@pytest.fixture(autouse=True)
def quick():
    """As a model that is loaded in 4 bit asks for it."""
    quantization({"type": "nf4", "double": True}, torch.bfloat16)


def both(weight, blocksize=64, kind="nf4", storage=torch.uint8):
    """What a CPU does, and what bitsandbytes would have done."""
    quantize = torch.ops.bitsandbytes.quantize_4bit.default
    settings = weight, blocksize, kind, storage
    return quantize(*settings), quantize.redispatch(DEFAULT, *settings)


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.view(torch.uint8).equal(other.view(torch.uint8))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_codes_and_magnitudes_are_those_of_bitsandbytes(kind, dtype, storage):
    weight = torch.randn(64, 48, generator=torch.manual_seed(0)).to(dtype) * 0.02
    assert_same(*both(weight, kind=kind, storage=storage))


def test_a_matrix_of_several_pieces():
    weight = torch.randn(3, PIECE // 2 + 64, generator=torch.manual_seed(0))
    assert_same(*both(weight))


def test_elements_that_fill_no_block_and_no_byte():
    weight = torch.tensor([[0.5, -1.0, 0.24, 0.0, 2.0] * 27])
    assert_same(*both(weight))


def test_values_on_a_limit_get_the_lower_code():
    limits, _ = _get_4bit_quantize_bounds("nf4", torch.device("cpu"))
    ours, theirs = both(torch.cat([limits, torch.ones(1)]), blocksize=16)
    assert_same(ours, theirs)
    assert ours[0].flatten().tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]


def test_a_block_of_zeros():
    assert_same(*both(torch.zeros(2, 64)))


def test_the_kernel_is_not_the_default_one(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("searched")

    monkeypatch.setattr(torch, "bucketize", refuse)
    weight = torch.ones(2, 64)
    quantize = torch.ops.bitsandbytes.quantize_4bit.default
    quantize(weight, 64, "nf4", torch.uint8)
    with pytest.raises(AssertionError, match="searched"):
        quantize.redispatch(DEFAULT, weight, 64, "nf4", torch.uint8)
