"""What tests build: a tiny real model, a small project, and Snakemake run as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from finetune.config import merge

ROOT = Path(__file__).resolve().parents[1]

TEXT = "turn on off the light in kitchen bedroom set to and a is what yes no one two"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(folder: Path, tied: bool = True, **shape: int) -> None:
    """`shape` makes it larger."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    tiny = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    config = LlamaConfig(
        **tiny | shape,
        tie_word_embeddings=tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tiny_gemma(folder: Path) -> None:
    """Gemma 3 as from 4B on: a decoder, and a vision tower with a projector."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    text = {"vocab_size": len(tokenizer) + 3, "hidden_size": 64, "intermediate_size": 128}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}
    images = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    images |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    special = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    marks = ("boi_token_index", "eoi_token_index", "image_token_index")
    config = Gemma3Config(
        text_config=text | {"max_position_embeddings": 256},
        vision_config=images | {"vision_use_head": False},
        mm_tokens_per_image=4,
        **special,
        **{name: len(tokenizer) + index for index, name in enumerate(marks)},
    )
    Gemma3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer():
    """Byte-level BPE, trained on a few words, with ChatML markers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
    )


def snakemake(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Snakemake on this repository in the folder `cwd`; stdout and stderr together."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), *args]
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )


ROWS = [
    {
        "prompt": f"turn {state} the light in the {room} {n}",
        "completion": f'{{"{room}": "{state}"}}',
    }
    for n in ("one", "two", "one two", "two one", "one one")
    for room in ("kitchen", "bedroom", "kitchen kitchen bedroom")
    for state in ("on", "off")
] + [
    {"prompt": f"what is {n}", "completion": "a light is on in the kitchen and off in " + n * 3}
    for n in (" yes", " no", " two", " one", " off", " on", " kitchen", " bedroom", " the", " to")
]
"""40 rows whose completions differ much in length, so that wrong averaging shows."""

CONFIG = {
    "models": {"tiny": {"source": None}},
    "datasets": {
        "lights": {
            "source": "rows.jsonl",
            "split": {"validation": 0.1, "test": 0.15, "seed": 1},
            "max_length": 200,
            "evaluation": {
                "metrics": ["exact_match", "rouge", "json"],
                "max_new_tokens": 8,
                "batch_size": 8,
            },
        }
    },
    "defaults": {
        "model": "tiny",
        "dataset": "lights",
        "gpus": 2,
        "batch": {"global": 4, "micro": 1},
        "gradient_checkpointing": False,
        "steps": 4,
        "log_every": 1,
        "validate_every": 2,
    },
    "runs": {
        "tiny-qlora": {"method": "qlora", "lora": {"rank": 4, "alpha": 8}},
        "tiny-full": {"method": "full", "optimizer": {"learning_rate": 1e-3}},
    },
}


def make_project(folder: Path, model: Path, **changes: dict) -> Path:
    """A working folder with rows and a config: CONFIG, deeply merged with `changes`."""
    config = merge(CONFIG, {"models": {"tiny": {"source": str(model)}}})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "config.yaml").write_text(yaml.safe_dump(merge(config, changes)))
    return folder


def job_counts(output: str) -> dict[str, int]:
    """The table of jobs that Snakemake prints."""
    rows = re.findall(r"^(\w+) +(\d+)$", output.split("Job stats:")[-1], flags=re.M)
    return {name: int(count) for name, count in rows if name != "total"}
