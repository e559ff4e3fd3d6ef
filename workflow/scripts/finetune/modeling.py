"""The model as a method trains it: 4-bit with adapters, 16-bit with adapters, or all of it.

`labels`, the names of the classes, ask for a classifier. Without them it is a causal LM.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from finetune.architecture import head_of
from finetune.attention import default_attention
from finetune.cli import UserError
from finetune.head import lose_in_pieces
from finetune.towers import in_towers, tower_weights


def compute_dtype() -> torch.dtype:
    """bf16 wherever the device has it; fp16 only on GPUs that do not (before Ampere)."""
    if not torch.cuda.is_available():
        return torch.bfloat16
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float16


def load_for_training(
    folder: Path,
    settings: dict,
    local_rank: int,
    labels: list[str] | None = None,
    longest: int = 0,
    packed: bool = False,
) -> torch.nn.Module:
    """The model with its trainable parameters set, on this rank's device. `longest` is the length
    of the longest row, in tokens; `packed` rows hold several samples.

    Under ZeRO-3 this must run after TrainingArguments exist: transformers then builds the
    model inside `deepspeed.zero.Init`, already sharded.
    """
    trust = settings["trust_remote_code"]
    auto, head = head_of(folder, trust, labels)
    model, found = auto.from_pretrained(
        folder,
        dtype=weight_dtype(settings),
        attn_implementation=settings["attention"]
        or fitting_attention(longest, packed, folder, trust),
        trust_remote_code=trust,
        output_loading_info=True,
        ignore_mismatched_sizes=labels is not None,  # the head of a classifier of other classes
        **head,
        **placement(settings, local_rank),
    )
    model.config.use_cache = False  # a cache is for generation; in training it only costs memory
    if labels is None:
        lose_in_pieces(model)
    if settings["method"] == "full":
        for weight in tower_weights(model):
            weight.requires_grad = False
        return model
    if settings["method"] == "qlora":
        keep_gradients_on_cpu(model)
    return add_adapters(model, settings, new_modules(model, found) if labels else None)


def fitting_attention(
    longest: int, packed: bool, folder: Path, trust_remote_code: bool
) -> str | None:
    """The default; for packs on a GPU FlashAttention, which has a fast kernel for them. SDPA needs
    a mask there, and then has none."""
    cpu = not torch.cuda.is_available()
    if cpu or not packed:
        return default_attention(longest, cpu)
    from finetune.varlen import flash_attention

    return flash_attention(folder, trust_remote_code)


def weight_dtype(settings: dict) -> torch.dtype:
    """Full fine-tuning under DDP keeps fp32 weights and computes under autocast; DeepSpeed
    keeps its own fp32 master copy, so there, and under adapters, weights are 16-bit."""
    alone = settings["method"] == "full" and settings["launch"] == "ddp"
    return torch.float32 if alone else compute_dtype()


def placement(settings: dict, local_rank: int) -> dict:
    """Pin a quantized model to this rank's device.

    Never "auto": it spreads one model over all GPUs, and the Trainer then turns DDP off without
    a word. Other loads need no device map: the Trainer or DeepSpeed places them.
    """
    if settings["method"] != "qlora":
        return {}
    device = local_rank if torch.cuda.is_available() else "cpu"
    return {
        "device_map": {"": device},
        "quantization_config": quantization(settings["quantization"], compute_dtype()),
    }


def quantization(section: dict, dtype: torch.dtype):
    from transformers import BitsAndBytesConfig

    from finetune.quantizing import quantize_quickly_on_cpu

    quantize_quickly_on_cpu()
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=section["type"],
        bnb_4bit_use_double_quant=section["double"],
        bnb_4bit_compute_dtype=dtype,
    )


def keep_gradients_on_cpu(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights for CPU inference.

    On CPUs with AVX512-BF16, bitsandbytes 0.50 repacks them at the first forward in eval mode.
    Every later training step then loses the gradients behind them, silently.
    """
    import bitsandbytes as bnb

    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


def new_modules(model: PreTrainedModel, found: dict) -> list[str]:
    """Modules that start at random, since the files have no weights for them: the whole head, of
    whatever layers (DistilBERT's has two), and BERT's pooler where a model came without."""
    names = found["missing_keys"] | {name for name, *_ in found["mismatched_keys"]}
    inside = f"{model.base_model_prefix}."
    modules = {
        name.rpartition(".")[0] if name.startswith(inside) else name.partition(".")[0]
        for name in names
    }
    return sorted(modules)


def add_adapters(
    model: PreTrainedModel, settings: dict, new: list[str] | None = None
) -> torch.nn.Module:
    """LoRA layers; peft keeps them in fp32 over a 16-bit base. What is `new` in a classifier is
    trained whole, and saved with the adapter."""
    from peft import LoraConfig, get_peft_model

    from finetune.adapter import lean

    lora = settings["lora"]
    adapted = get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM" if new is None else "SEQ_CLS",
            r=lora["rank"],
            lora_alpha=lora["alpha"],
            lora_dropout=lora["dropout"],
            target_modules=lora["target_modules"],
            exclude_modules=in_towers(model),
            modules_to_save=new,
        ),
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # peft leaves whole modules in 16 bit
    if not settings["launch"].startswith("zero3"):  # it gathers weights when peft calls a layer
        lean(adapted)
    return adapted


def load_for_inference(
    folder: Path,
    trust_remote_code: bool,
    quantized: dict | None = None,
    device: str = "cpu",
    labels: list[str] | None = None,
) -> PreTrainedModel:
    """A model to score or generate with, in 16 bit, or in 4 bit as QLoRA trained on it. `device`
    may be "balanced": spread over all GPUs that are visible, layer after layer.

    Raises UserError where these do not hold it."""
    # of a GPU that is not asked for nothing is asked: that would start CUDA
    dtype = compute_dtype() if device != "cpu" else torch.bfloat16
    config = {"quantization_config": quantization(quantized, dtype)} if quantized else {}
    auto, head = head_of(folder, trust_remote_code, labels)
    model = auto.from_pretrained(
        folder,
        dtype=dtype,
        device_map=device,
        trust_remote_code=trust_remote_code,
        ignore_mismatched_sizes=labels is not None,  # a base; merging brings the trained head
        **head,
        **config,
    )
    if device == "balanced":
        if left := left_out(model.hf_device_map):
            raise UserError(
                f"{folder}: {torch.cuda.device_count()} GPUs do not hold it in 16 bit, {len(left)} "
                "of its parts are left over. Set evaluation.gpus higher."
            )
        return_states(model)
    return model.eval()


def left_out(device_map: dict) -> list[str]:
    """Parts that transformers puts on the host or on disk, without a word, where GPUs are full:
    each would be copied for each token."""
    return [name for name, device in device_map.items() if device in ("cpu", "disk")]


def return_states(model: PreTrainedModel) -> None:
    """Have the decoder's states come back to the device of its inputs: `logits_to_keep` is there,
    and indexes them."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    stays = model._skip_keys_device_placement  # the cache, of which each layer has its own
    hook = AlignDevicesHook(io_same_device=True, skip_keys=stays)
    add_hook_to_module(model.base_model, hook, append=True)
