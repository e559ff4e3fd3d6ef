"""Rule fetch_model: bring a base model to this machine and say what it is.

Reads a hub id, a local folder, a GGUF file or a file inside an installed package.
Writes `pretrained/`, a folder that `from_pretrained` opens (weights are links wherever they
already lie on this machine; GGUF, MXFP4 and FP8 are converted to bf16 safetensors once), and
`model.json`: commit or digests, architecture, exact parameter counts, what was repaired.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from finetune.cli import UserError, read_settings, run_script, say, speak_for
from finetune.dequantizing import dequantize, quantized_as, refuse_quantized
from finetune.files import complete_directory, digest_file, write_json
from finetune.hub import download_model
from finetune.sources import locate_model, visible_files

WEIGHTS = (".safetensors", ".bin")
ORIGIN = ("source", "revision", "trust_remote_code")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", required=True, type=read_settings)
    parser.add_argument("--pretrained", required=True, type=Path)
    parser.add_argument("--record", required=True, type=Path)
    args = parser.parse_args()

    speak_for(args.record.parent.name)
    source, commit = resolve(**{k: args.settings[k] for k in ORIGIN})
    with complete_directory(args.pretrained) as folder:
        notes = write_weights(source, folder, args.settings["trust_remote_code"])
        check_weights(folder, args.settings["trust_remote_code"])
        notes += write_tokenizer(folder, args.settings)
        record = describe(folder, args.settings) | {"commit": commit, "repairs": notes}
    record["files"] = file_record(args.pretrained, with_digests=commit is None)
    write_json(args.record, record)
    for note in notes:
        say(f"repaired: {note}")
    millions = record["parameters"] / 1e6
    say(f"{record['architecture']}, {millions:.1f} M parameters, from {source}")


def resolve(source: str, revision: str | None, trust_remote_code: bool) -> tuple[Path, str | None]:
    """Where the model lies on this machine, and its commit if it came from the hub."""
    found = locate_model(source)
    if found is not None:
        if found.is_dir():
            refuse_quantized(found)
        return found, None
    return download_model(source, revision, with_code=trust_remote_code)


def write_weights(source: Path, folder: Path, trust_remote_code: bool) -> list[str]:
    """The model in 16 or 32 bit, as links where it lies so on this machine; what was changed."""
    notes = []
    if source.suffix == ".gguf":
        convert_gguf(source, folder)
    elif quantized_as(source):
        model_config(source, trust_remote_code)  # its refusal comes first
        notes.append(dequantize(source, folder, trust_remote_code))
        link_files(source, folder, but=WEIGHTS)
    else:
        link_files(source, folder)
        return notes
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes 0600, which other users cannot serve
    return notes


def convert_gguf(file: Path, folder: Path) -> None:
    """GGUF to bf16 safetensors, which every later stage loads ten times faster."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def link_files(source: Path, folder: Path, but: tuple[str, ...] = ()) -> None:
    """Link what lies on this machine and was not made anew: weights are never copied. `but` ends
    the names of those that are left out."""
    for path in visible_files(source):
        target = folder / path.relative_to(source)
        if target.exists() or path.name.removesuffix(".index.json").endswith(but):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path.resolve())


def check_weights(folder: Path, trust_remote_code: bool) -> None:
    """Refuse a model that lacks a tensor: transformers would start it from random values.

    Tensors that the architecture does not know are left alone: old files carry some.
    """
    from finetune.weights import differences, expected_shapes, found_shapes

    if not any(folder.glob("*.safetensors")):
        return
    model_config(folder, trust_remote_code)  # its refusal comes first
    expected = expected_shapes(folder, trust_remote_code)
    found = found_shapes(folder, expected)
    found = {name: shape for name, shape in found.items() if name in expected.shapes}
    if faults := list(differences(found, expected)):
        raise UserError(
            f"the weights are not whole: {'; '.join(faults[:3])} ({len(faults)} faults in all). "
            "Fetch or copy the model again."
        )


def write_tokenizer(folder: Path, settings: dict) -> list[str]:
    """Replace the tokenizer by a repaired one; where the model generates, its config too."""
    from finetune.architecture import is_causal
    from finetune.tokenizer import load_tokenizer, repair

    config = model_config(folder, settings["trust_remote_code"])
    tokenizer = load_tokenizer(folder, settings["trust_remote_code"])
    chosen = settings["pad_token"], settings["chat_template"]
    notes = repair(tokenizer, config, *chosen, causal=is_causal(config))
    with TemporaryDirectory(dir=folder.parent) as new:
        tokenizer.save_pretrained(new)
        if is_causal(config):
            generation = generation_config(folder, config, tokenizer)
            notes += add_stop_token(generation, tokenizer)
            generation.save_pretrained(new)
        for path in visible_files(Path(new)):
            target = folder / path.relative_to(new)
            target.parent.mkdir(exist_ok=True)
            os.replace(path, target)  # replaces a link, where saving would write through it
    return notes


def generation_config(folder: Path, config, tokenizer):
    """The model's own, with the repaired pad token."""
    from transformers import GenerationConfig

    generation = GenerationConfig.from_model_config(config)
    if (folder / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(folder)
    generation.pad_token_id = tokenizer.pad_token_id
    if generation.temperature is not None or generation.top_p is not None:
        generation.do_sample = True  # older models leave it out, and cannot be saved without
    return generation


def add_stop_token(generation, tokenizer) -> list[str]:
    """Let generation stop at the token with which the chat template ends a turn. A base model
    that gets a template knows only the EOS of its own."""
    from finetune.examples import encode_conversation

    if tokenizer.chat_template is None:
        return []
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    last = encode_conversation(tokenizer, turns)[0].input_ids[-1]
    known = generation.eos_token_id
    known = known if isinstance(known, list) else [known] if known is not None else []
    if last in known:
        return []
    generation.eos_token_id = [*known, last]
    return [f"generation stops at {tokenizer.decode([last])!r} too"]


def model_config(folder: Path, trust_remote_code: bool):
    """The model's config. Code that ships with a model runs only where the user said so."""
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    raw, _ = PretrainedConfig.get_config_dict(folder)
    foreign = "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING
    if foreign and not trust_remote_code:
        raise UserError(
            "this model runs Python code of its own. Read it, then set "
            "`trust_remote_code: true` under the model if you trust it."
        )
    return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def describe(folder: Path, settings: dict) -> dict:
    """Architecture and exact counts, from the meta device: no weight is read."""
    from finetune.architecture import is_causal, outline
    from finetune.shapes import context_of

    model = outline(folder, settings["trust_remote_code"])
    return {
        "source": settings["source"],
        "architecture": type(model).__name__,
        "causal": is_causal(model.config),
        # parameters() yields a tied weight once
        "parameters": sum(p.numel() for p in model.parameters()),
        "context": context_of(model.config),
        "shapes": counted(model),
    }


def counted(model) -> dict | None:
    """What plans are made from, but for a classifier's head; None for a model of another kind."""
    from finetune.shapes import shapes_of

    try:
        return asdict(shapes_of(model))
    except ValueError:
        return None


def file_record(folder: Path, with_digests: bool) -> dict[str, dict]:
    """Sizes of all files; SHA-256 too where no commit vouches for the content."""
    record: dict[str, dict] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        entry = record[str(path.relative_to(folder))] = {"bytes": os.stat(path).st_size}
        if with_digests and path.suffix in WEIGHTS:
            entry["sha256"] = digest_file(path)
    return record


if __name__ == "__main__":
    run_script(main)
