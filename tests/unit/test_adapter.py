"""LoRA layers that train as peft's do, and keep less for the backward pass."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

from finetune import adapter
from finetune.adapter import (
    LEAN,
    AddAdapter,
    draw,
    dropped,
    keep_mask,
    lean,
    random_words,
    takes_generators,
)

SIZES = [(6, 10), (10, 4)]
CPU = torch.device("cpu")
SEEDS = pytest.mark.parametrize("seed", [torch.tensor(7), 7], ids=["splitmix", "generator"])


@pytest.fixture(params=["splitmix", "generator"])
def way(request, monkeypatch):
    """How masks are made: as on a CPU and in compiled code, or as on a GPU."""
    monkeypatch.setattr(adapter, "takes_generators", lambda _: request.param == "generator")
    return request.param


def adapted(dropout=0.0, dtype=torch.float32, **changes):
    """Two layers, the first without bias, with adapters that have moved."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(*size, bias=size[0] > 6).to(dtype) for size in SIZES]
    model = torch.nn.Sequential(layers[0], torch.nn.SiLU(), layers[1])
    config = LoraConfig(r=3, lora_alpha=5, lora_dropout=dropout, target_modules=["0", "2"])
    for name, value in changes.items():
        setattr(config, name, value)
    model = get_peft_model(model, config).train()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape) * 0.3
    return model


def kept(x, share, seed):
    """Ones and zeros, however they are held."""
    return dropped(torch.ones_like(x), keep_mask(x, share, seed))


def bits(keep):
    """The mask of it: all bits of a byte, or none."""
    return -keep.to(torch.int8)


def lean_layers(model):
    return [module for module in model.modules() if type(module) in LEAN.values()]


def step(model, dtype=torch.float32):
    """Output, and gradients of the input and of all adapters."""
    x = torch.randn(2, 5, 6, generator=torch.manual_seed(1)).to(dtype).requires_grad_()
    out = model(x)
    (out.float() * torch.arange(4)).sum().backward()
    return [out, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02), (torch.float16, 0.003)]
)
def test_outputs_and_gradients_are_those_of_peft(dtype, tolerance):
    ours = adapted(dtype=dtype)
    lean(ours)
    assert len(lean_layers(ours)) == 2
    found, wanted = step(ours, dtype), step(adapted(dtype=dtype), dtype)
    assert len(found) == 2 + 4
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is other.dtype
        assert (one - other).norm() <= tolerance * other.norm()


@SEEDS
def test_gradients_are_right_for_the_mask_that_was_drawn(seed):
    """Against those of the formula, written out."""
    out, x = torch.randn(4, 5), torch.randn(4, 6)
    matrices = torch.randn(3, 6), torch.randn(5, 3)
    share = 0.4
    mask = kept(torch.empty(4, 6), share, seed)
    assert {0, 1} == set(mask.flatten().tolist())

    def plain(out, x, a, b):
        return out + 0.7 * (x * mask) @ a.T @ b.T

    given = [tensor.requires_grad_() for tensor in (out, x, *matrices)]
    weights = torch.randn(4, 5)
    wanted = torch.autograd.grad((plain(*given) * weights).sum(), given)
    found = torch.autograd.grad((AddAdapter.apply(*given, share, seed, 0.7) * weights).sum(), given)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_dropout_drops_its_share_and_keeps_the_expectation(share, way):
    model = adapted(dropout=share)
    layer = model.base_model.model[0]
    x = torch.ones(40_000, 6)
    whole = layer.eval()(x)[0]
    lean(model)
    layer.train()
    out = layer(x)
    assert not torch.equal(out[0], out[1])
    torch.testing.assert_close(out.mean(0), whole, rtol=0.02, atol=0.02)
    exact, seed = draw(share, CPU)
    mask = kept(torch.empty(1000, 77), exact, seed)
    assert mask.mean() == pytest.approx(1 - exact, abs=0.005)
    assert mask.std(dim=0).max() < mask.std() * 1.2  # no column is kept or dropped alone


@pytest.mark.parametrize(("asked", "steps"), [(0.001, 1), (0.05, 13), (0.999, 255)])
def test_some_is_dropped_where_it_was_asked_for_and_never_all(asked, steps, way):
    assert draw(asked, CPU)[0] == (asked if way == "generator" else steps / 256)
    [layer, _] = lean_layers(leaned(asked))
    assert layer(torch.ones(9, 6)).isfinite().all()


def test_a_gpu_has_generators_but_in_compiled_code():
    def asked():
        return takes_generators(torch.device("cuda"))

    assert asked()
    assert not torch.compile(asked, backend="eager", fullgraph=True)()
    assert not takes_generators(CPU)


def leaned(dropout):
    model = adapted(dropout)
    lean(model)
    return model


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_draw_their_masks_again(reentrant, way):
    found = []
    for again in (False, True):
        torch.manual_seed(4)
        model, x = leaned(0.5), torch.randn(3, 6, requires_grad=True)
        torch.manual_seed(5)
        out = checkpoint(model, x, use_reentrant=reentrant) if again else model(x)
        torch.rand(7)  # the generator goes on
        out.square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters() if p.requires_grad)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_same_seed_draws_the_same_mask(way):
    """What the backward pass, checkpointed activations and a resumed run rely on."""
    x = torch.empty(3, 50)
    draws = [torch.manual_seed(4) and draw(0.3, CPU) for _ in range(2)]
    before = torch.get_rng_state()
    one, two = (keep_mask(x, *drawn) for drawn in draws)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, two)
    assert not torch.equal(one, keep_mask(x, *draw(0.3, CPU)))
    assert not one.all()


@SEEDS
def test_a_mask_is_not_kept(seed):
    """But the input, which others keep too, both matrices, the product, and a seed."""
    given = [torch.randn(*size, requires_grad=True) for size in ((9, 4), (9, 6), (3, 6), (4, 3))]
    held = AddAdapter.apply(*given, 0.4, seed, 0.7).grad_fn.saved_tensors
    assert [t.numel() for t in held if t is not None][:4] == [54, 18, 12, 27]
    assert len([t for t in held if t is not None and t.dim()]) == 4


def test_random_words_are_those_that_others_have_of_splitmix64():
    """rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64"""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [word % 2**64 for word in random_words(4, torch.tensor(1234567)).tolist()] == known


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62])
def test_bytes_of_a_mask_are_as_likely_as_each_other(seed):
    """Pearson's chi-squared of each of the eight bytes of a word: of 255 degrees of freedom, above
    347 in one of 10,000 cases. And neighbours know nothing of each other."""
    drawn = random_words(200_000, torch.tensor(seed)).view(torch.uint8).view(-1, 8).int()
    for column in drawn.T:
        counts = torch.bincount(column, minlength=256).float()
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 347
    small = (drawn.flatten() < 13).float()
    together = (small[1:] * small[:-1]).mean()
    assert together == pytest.approx((13 / 256) ** 2, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_on_bits_is_a_product(dtype):
    rows = torch.tensor([[1.5, -2.0, 3e-5], [-0.0, 100.0, -7.25]], dtype=dtype)
    keep = torch.tensor([[True, False, True], [False, True, False]])
    assert torch.equal(dropped(rows, bits(keep)), rows * keep)
    assert torch.equal(dropped(rows, keep.to(dtype)), rows * keep)


def test_outside_training_and_with_adapters_off_it_is_peft():
    ours, theirs = adapted(0.5), adapted(0.5)
    lean(ours)
    x = torch.randn(2, 6)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    with ours.train().disable_adapter():
        assert torch.equal(
            ours(x),
            ours.base_model.model[2].base_layer(
                torch.nn.functional.silu(ours.base_model.model[0].base_layer(x))
            ),
        )


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"lora_bias": True}])
def test_layers_that_compute_something_else_are_left_alone(changes):
    model = adapted(**changes)
    lean(model)
    assert not lean_layers(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_it_computes_in_16_bit_and_returns_what_its_layer_does(dtype):
    """On a GPU autocast makes norms fp32, and 4-bit layers return the type of their input. No
    autocast is on in the backward pass."""
    out, x = torch.randn(2, 5, 4, dtype=dtype), torch.randn(2, 5, 6, dtype=dtype)
    matrices = torch.randn(3, 6), torch.randn(4, 3)
    given = [tensor.requires_grad_() for tensor in (out, x, *matrices)]
    with torch.autocast("cpu", torch.bfloat16):
        found = AddAdapter.apply(*given, 0.0, None, 0.7)
    assert found.dtype is dtype
    assert {t.dtype for t in found.grad_fn.saved_tensors if t is not None} == {torch.bfloat16}
    wanted = out.float() + 0.7 * x.float() @ matrices[0].T @ matrices[1].T
    weights = torch.randn(2, 5, 4)
    gradients = [torch.autograd.grad((y * weights).sum(), given) for y in (found, wanted)]
    for one, other in zip((found, *gradients[0]), (wanted, *gradients[1]), strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
    assert [gradient.dtype for gradient in gradients[0]] == [tensor.dtype for tensor in given]
