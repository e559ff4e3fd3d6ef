"""What memory formulas need to know of a model: counted on the meta device, where no weight is.

`Shapes` is plain numbers. `shapes_of` reads them from an outline (`architecture.outline`): exact
counts from its modules, and from its config only what modules do not show. What sees or hears
(`towers`) counts as weights alone: text does not run through it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING

from finetune.towers import in_towers, text_modules, tower_weights

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from transformers import PretrainedConfig, PreTrainedModel

PERSISTENT = 10
"""Times hidden size: ZeRO-3 does not partition smaller tensors (transformers integrations/
deepspeed.py fills in stage3_param_persistence_threshold so)."""

WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim")
"""What configs call the width of an MLP; that of an expert may be `moe_intermediate_size`."""


@dataclass(frozen=True)
class Layer:
    """A kind of linear layer that adapters can take, and how many of it there are."""

    name: str
    in_features: int
    out_features: int
    count: int


@dataclass(frozen=True)
class Shapes:
    """Numbers of a model. A tied weight counts once."""

    parameters: int
    frozen: int
    """Of towers that see or hear, which are never trained."""
    linear: tuple[Layer, ...]
    quantized: int
    """Weights of the layers that bitsandbytes makes 4-bit. Experts in one tensor stay 16-bit."""
    largest_quantized: int
    block: int
    """Parameters of the largest block."""
    outside: int
    """Of the largest module that is in no block: mostly the embedding."""
    persistent: int
    """Of tensors so small that ZeRO-3 leaves them whole on each GPU."""
    head: int
    """Of what is new in a classifier, and is trained whole beside adapters."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    gated: bool
    """The MLP multiplies two projections of its input (Shazeer 2020, arXiv 2002.05202)."""
    gelu: int
    """Tensors an activation function keeps: 1, or 4 where it is written out in Python."""
    normed: int
    """Elements a token has in all norms of a block."""
    rms: bool
    experts: int
    """Experts a token goes through; 0 for a dense model."""
    expert_weights: int
    """In experts, which are tensors of three dimensions."""
    expert_adapters: int
    """Parameters of `all-linear` adapters on experts, for each rank."""
    dropout: bool
    """The model has dropout of its own, as BERT and GPT-2 do."""
    vocab: int
    context: int | None
    attention: str
    """The implementation that transformers picks."""

    def adapter(self, rank: int, targets: str | list[str]) -> int:
        """Parameters of LoRA adapters (Hu et al. 2021, arXiv 2106.09685, section 4.1)."""
        wide = sum((x.in_features + x.out_features) * x.count for x in self.adapted(targets))
        return rank * (wide + (self.expert_adapters if targets == "all-linear" else 0))

    def adapted(self, targets: str | list[str]) -> list[Layer]:
        return [x for x in self.linear if targets == "all-linear" or x.name in targets]


def recorded(record: dict | None) -> Shapes | None:
    """Shapes from the JSON of `asdict`; None if there are none, or other code counted others."""
    if record is None or record.keys() != {field.name for field in fields(Shapes)}:
        return None
    return Shapes(**record | {"linear": tuple(Layer(**layer) for layer in record["linear"])})


def shapes_of(model: PreTrainedModel) -> Shapes:
    """Count a model. On the meta device this takes no memory. Raises ValueError for one without
    attention, as Mamba is: its layers keep what no formula here counts."""
    config, reached = model.config.get_text_config(), text_modules(model)
    hidden, heads = config.hidden_size, widest(config, "num_attention_heads")
    if heads is None:
        raise ValueError(f"{type(model).__name__} does not say how many attention heads it has")
    experts = expert_tensors(reached.values())
    widths = ("moe_intermediate_size", *WIDTHS) if experts else WIDTHS
    width = widest(config, *widths) or 4 * hidden
    linear = linear_layers(reached, model.get_output_embeddings())
    activation = getattr(config, "hidden_act", None) or getattr(config, "activation_function", "")
    return Shapes(
        # parameters() yields a tied weight once
        parameters=sum(p.numel() for p in model.parameters()),
        frozen=sum(p.numel() for p in tower_weights(model)),
        linear=tuple(linear),
        **quantized_sizes(model),
        **block_sizes(model, config.num_hidden_layers),
        persistent=sum(p.numel() for p in model.parameters() if p.numel() < PERSISTENT * hidden),
        head=head_size(model),
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=widest(config, "num_key_value_heads") or heads,
        head_dim=widest(config, "head_dim") or hidden // heads,
        intermediate=width,
        gated=bool(experts)
        or any("gate" in x.name and x.out_features % width == 0 for x in linear),
        gelu=4 if activation in ("gelu_new", "gelu_fast") else 1,
        normed=normed(reached.values(), hidden, heads) // config.num_hidden_layers,
        rms=any("RMS" in type(module).__name__ for module in reached.values()),
        experts=(getattr(config, "num_experts_per_tok", None) or 1) if experts else 0,
        expert_weights=sum(p.numel() for p in experts),
        expert_adapters=expert_adapters(model, linear) if experts else 0,
        dropout=any(getattr(config, k, 0) for k in ("hidden_dropout_prob", "resid_pdrop")),
        vocab=config.vocab_size,
        context=context_of(config),
        attention=model.config._attn_implementation,
    )


def context_of(config: PretrainedConfig) -> int | None:
    """Positions that a model has; None if it has no limit. Of one that sees images too, the part
    that reads."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def widest(config: PretrainedConfig, *names: str) -> int | None:
    """The first of `names` that is set. Layers may differ in it, as those of Gemma 3n and 4 do."""
    for name in names:
        found = [getattr(layer, name, None) for layer in config.per_layer_config]
        lists = [size if isinstance(size, list) else [size or 0] for size in found]
        if size := max(map(max, lists), default=0):
            return size
    return None


def expert_tensors(modules: Iterable[Module]) -> list[Parameter]:
    """All experts of a layer in one tensor of three dimensions, which convolutions have too."""
    from torch.nn import Conv1d

    others = (m for m in modules if not isinstance(m, Conv1d))
    return [p for m in others for p in m.parameters(recurse=False) if p.ndim == 3]


def expert_adapters(model: PreTrainedModel, linear: list[Layer]) -> int:
    """What peft adds beyond linear layers, counted on a copy of the outline. Its rules differ from
    model to model (peft utils/transformers_weight_conversion.py)."""
    import copy

    from peft import LoraConfig, get_peft_model

    chosen = {"target_modules": "all-linear", "exclude_modules": in_towers(model)}
    lora = LoraConfig(r=8, lora_dropout=0.0, **chosen)
    # else what is new is made in memory
    adapted = get_peft_model(copy.deepcopy(model), lora, low_cpu_mem_usage=True)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return trained // 8 - sum((x.in_features + x.out_features) * x.count for x in linear)


def normed(modules: Iterable[Module], hidden: int, heads: int) -> int:
    """Elements a token has in all norms. Those of queries and keys are applied to each head."""
    sizes = [
        module.weight.numel()
        for module in modules
        if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None
    ]
    return sum(n if n >= hidden else n * heads for n in sizes)


def linear_layers(modules: Mapping[str, Module], head: Module | None) -> list[Layer]:
    """The layers that `all-linear` adapters take: all but the head."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    counts: Counter = Counter()
    for path, module in modules.items():
        if isinstance(module, (Linear, Conv1D)) and module is not head:
            rows, columns = module.weight.shape
            turned = isinstance(module, Conv1D)  # GPT-2 stores its weights transposed
            size = (rows, columns) if turned else (columns, rows)
            counts[(path.rsplit(".", 1)[-1], *size)] += 1
    return [Layer(*key, count) for key, count in counts.items()]


def quantized_sizes(model: PreTrainedModel) -> dict[str, int]:
    """By transformers' own rule (integrations/bitsandbytes.py, replace_with_bnb_linear)."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = get_keys_to_not_convert(model)
    sizes = [
        module.weight.numel()
        for name, module in model.named_modules()
        if (type(module) is Linear or isinstance(module, Conv1D))
        and should_convert_module(name, kept)
    ]
    return {"quantized": sum(sizes), "largest_quantized": max(sizes, default=0)}


def block_sizes(model: PreTrainedModel, layers: int) -> dict[str, int]:
    """The list of blocks is the one as long as the model is deep."""
    from torch.nn import ModuleList

    stacks = [m for m in model.modules() if isinstance(m, ModuleList) and len(m) == layers]
    blocks = max(
        ([sum(p.numel() for p in block.parameters()) for block in stack] for stack in stacks),
        key=sum,
        default=[0],
    )
    inside = {id(m) for stack in stacks for m in stack.modules()}
    outside = [
        sum(p.numel() for p in m.parameters(recurse=False))
        for m in model.modules()
        if id(m) not in inside
    ]
    return {"block": max(blocks), "outside": max(outside)}


def head_size(model: PreTrainedModel) -> int:
    """Parameters outside the base model: a classifier's head, or a causal head that is not tied."""
    inside = {id(p) for p in model.base_model.parameters()}
    return sum(prod(p.shape) for p in model.parameters() if id(p) not in inside)
