"""Whether samples in a pack can be kept apart: tried on a small model of the same architecture.

Attention keeps them apart by positions that restart; layers with a state that runs along the row
(Mamba, linear attention, convolutions) mostly do not. No list of names says which: it depends on
the architecture and on the version of transformers.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations import deepspeed

from finetune.collator import restarting_positions

PACKS = [[9, 1, 14], [13, 6]]
"""Lengths of the samples. The second pack is shorter, so that padding is part of the proof."""
TOLERANCE = 1e-4
"""Of the largest logit: what fp32 sums in another order may differ."""
LARGEST = 500_000_000
"""Parameters that are tried at most, in fp32: 2 GB."""
WIDTH, VOCABULARY = 256, 128
LIMITED = re.compile(r"(window|window_size|chunk_size|index_topk)$")
"""Config keys that limit how many tokens a position sees, in some layers."""
REACH = 4
"""Their value in the small model: below the lengths of PACKS, or nothing would be limited."""


def why_not_isolated(
    config: PreTrainedConfig, find_leak: Callable[..., str | None] | None = None
) -> str | None:
    """None when packed samples get the logits they get alone, else the reason in one line.
    `find_leak(class, config)` tries a small model: first_leak, unless told otherwise."""
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None:
        return f"{type(config).__name__} is no causal language model that transformers itself knows"
    if kind.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()  # as from_pretrained loads it, without the vision tower
    if not takes_positions(kind):
        return f"{kind.__name__} takes no position_ids"
    reason = "there is nothing to try"
    for width in (WIDTH, None):
        try:
            with built_whole(), numbers_of_its_own():
                return (find_leak or first_leak)(kind, smallest(kind, config, width))
        except Exception as error:
            # an odd config breaks in any way it likes; packing must then be off, not tokenizing
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"could not try a small {kind.__name__}: {reason}"


@contextmanager
def built_whole() -> Iterator[None]:
    """Models are ordinary ones, also in training under ZeRO-3: by then transformers would build
    them as shards, which no engine gathers."""
    told = deepspeed._hf_deepspeed_config_weak_ref and deepspeed._hf_deepspeed_config_weak_ref()
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if told:
            deepspeed.set_hf_deepspeed_config(told)


@contextmanager
def numbers_of_its_own() -> Iterator[None]:
    """The same in every trial, from the CPU's generator alone, which then goes on as before.
    torch.manual_seed would reset those of GPUs too."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def takes_positions(kind: type[PreTrainedModel]) -> bool:
    parameters = inspect.signature(kind.forward).parameters
    anything = inspect.Parameter.VAR_KEYWORD
    return "position_ids" in parameters or any(p.kind is anything for p in parameters.values())


def smallest(
    kind: type[PreTrainedModel], config: PreTrainedConfig, width: int | None
) -> PreTrainedConfig:
    """The fewest layers that hold every kind of module the whole model has: a hybrid without
    its state-space layers would prove nothing."""
    wanted = modules(on_meta(kind, config))
    whole, layers = config.get_text_config().num_hidden_layers, 2
    while True:
        small = shrink(config, min(layers, whole), width)
        model = on_meta(kind, small)
        if modules(model) == wanted:
            break
        if layers >= whole:
            raise ValueError(f"it lacks {', '.join(sorted(wanted - modules(model)))}")
        layers *= 2
    if (size := sum(p.numel() for p in model.parameters())) > LARGEST:
        raise ValueError(f"its smallest form still has {size / 1e6:.0f} M parameters")
    return small


def on_meta(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return kind._from_config(copy.deepcopy(config), dtype=torch.float32)


def modules(model: PreTrainedModel) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


def shrink(config: PreTrainedConfig, layers: int, width: int | None) -> PreTrainedConfig:
    """A copy with few layers, a small vocabulary, and windows shorter than the samples.

    Heads stay as they are. The width becomes `width` where the size of a head does not follow
    from it.
    """
    small = copy.deepcopy(config)
    small.__dict__.pop("quantization_config", None)
    for part in [small, *(getattr(small, name) for name in small.sub_configs)]:
        if isinstance(part, PreTrainedConfig):
            shrink_part(part, layers, width)
    return small


def shrink_part(part: PreTrainedConfig, layers: int, width: int | None) -> None:
    keep_layers(part, layers)
    for name, value in list(vars(part).items()):
        if name.startswith("vocab_size"):
            setattr(part, name, min(value, VOCABULARY))
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(part, name, None if value is None else 0)
        elif name.endswith("intermediate_size"):
            setattr(part, name, narrow(value))
        elif LIMITED.search(name) and isinstance(value, int) and value > REACH:
            setattr(part, name, REACH)
    if width and vars(part).get("head_dim"):
        part.hidden_size = min(width, part.hidden_size)


def narrow(size: int | list[int] | None) -> int | list[int] | None:
    """0 and None mean that there is no such layer."""
    if isinstance(size, list):
        return [narrow(one) for one in size]
    return size and min(size, 64)


def keep_layers(part: PreTrainedConfig, layers: int) -> None:
    """Keep at least `layers` layers, and one of each kind that lists of layers tell apart."""
    whole = getattr(part, "num_hidden_layers", None)
    if not isinstance(whole, int):
        return
    lists = {n: v for n, v in vars(part).items() if isinstance(v, list) and len(v) == whole}
    kinds = [str([values[i] for values in lists.values()]) for i in range(whole)]
    picked = {kinds.index(kind) for kind in kinds}
    others = (i for i in range(whole) if i not in picked)
    picked |= {i for i, _ in zip(others, range(layers - len(picked)), strict=False)}
    part.num_hidden_layers = len(picked)
    for name, values in lists.items():
        setattr(part, name, [values[i] for i in sorted(picked)])


def first_leak(kind: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for attention in ("eager", "sdpa")[: 1 + kind._supports_sdpa]:
        model.set_attn_implementation(attention)
        if reason := leak(model):
            return f"{reason} in a shrunken {kind.__name__} with {attention} attention"
    return None


@torch.no_grad()
def leak(model: PreTrainedModel) -> str | None:
    """Compare packed samples with the samples alone; see that the model could show a leak."""
    width = max(map(sum, PACKS))
    ids = torch.randint(3, VOCABULARY, (len(PACKS), width))
    packed = run(model, ids, restarting_positions(PACKS, width))
    if not packed.isfinite().all():
        return "padding makes logits that are no numbers"
    alone = [(place, run(model, ids[place][None])[0]) for place in samples()]
    bound = TOLERANCE * max(logits.abs().max().item() for _, logits in alone)
    found = max((packed[place] - logits).abs().max().item() for place, logits in alone)
    if not found <= bound:
        return f"packed samples change each other's logits by {found:.2g}"
    if not influence(model, ids) > 10 * bound:
        return "tokens change later logits too little to prove anything"
    return None


def influence(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """How far other tokens in the first sample move the logits behind it, in one long sample."""
    positions, first = torch.arange(ids.shape[1])[None], PACKS[0][0]
    other = ids[:1].clone()
    other[:, :first] = other[:, :first] - 1
    moved = run(model, other, positions) - run(model, ids[:1], positions)
    return moved[:, first:].abs().max().item()


def run(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor | None = None, **given: Any
) -> torch.Tensor:
    """(rows, length, vocabulary): logits."""
    given |= {} if positions is None else {"position_ids": positions}
    return model(input_ids=ids, use_cache=False, **given).logits


def samples() -> Iterator[tuple[int, slice]]:
    """Pack and place of each sample."""
    for index, lengths in enumerate(PACKS):
        for number, length in enumerate(lengths):
            start = sum(lengths[:number])
            yield index, slice(start, start + length)
