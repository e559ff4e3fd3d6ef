"""Rule merge: one folder of 16-bit weights, ready to serve, from whatever training left.

One process, no GPU, no process group: nothing can hang. Adapters are merged into the 16-bit
base; fully trained weights are linked. Both are checked tensor by tensor, and a merge is also
compared, on held-out rows, with the model as it was trained. Writes `model/` and `merge.json`.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from finetune.cli import UserError, read_settings, run_script, say, speak_for
from finetune.collator import RowCollator
from finetune.encoding import IGNORED
from finetune.files import check_complete, complete_directory, read_json, write_json
from finetune.heap import free_at_once
from finetune.merge_check import rows_compared
from finetune.model_card import model_card
from finetune.modeling import load_for_inference
from finetune.scores import batch_scores
from finetune.tokenizer import load_tokenizer
from finetune.tokens import open_tokens
from finetune.weights import TensorShapes, expected_shapes, verify

if TYPE_CHECKING:
    from peft import PeftModel

NEGLIGIBLE = 0.01
"""Nats. A loss near zero moves by a large share when logits are rounded to 16 bit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", required=True, type=read_settings)
    parser.add_argument("--trained", required=True, type=Path)
    parser.add_argument("--train-record", required=True, type=Path, help="train.json")
    parser.add_argument("--base", required=True, type=Path, help="pretrained/ of fetch_model")
    parser.add_argument("--tokens", required=True, type=Path, help="folder of tokenize_data")
    parser.add_argument("--output", required=True, type=Path, help="model/")
    parser.add_argument("--record", required=True, type=Path, help="merge.json")
    args = parser.parse_args()

    speak_for(args.output.parent.name)
    check_complete(args.trained)
    trust = args.settings["trust_remote_code"]
    facts = read_json(args.train_record)
    labels = read_json(args.tokens / "lint.json")["labels"]
    expected = expected_shapes(args.base, trust, labels)
    with complete_directory(args.output) as folder:
        if args.settings["method"] == "full":
            link_trained(args.trained, args.base, folder)
            record = {}
        else:
            record = merge_adapter(args, folder, expected.shapes, labels)
        record |= verify(folder, expected, args.trained)
        load_tokenizer(args.base, trust).save_pretrained(folder)
        if labels is None:
            shutil.copy(args.base / "generation_config.json", folder)
        (folder / "README.md").write_text(model_card(facts), encoding="utf-8")
    write_json(args.record, record)
    say(f"{args.output} holds {record['tensors']} tensors, all verified")


def link_trained(trained: Path, base: Path, folder: Path) -> None:
    """Hard links where the file system allows: the weights exist once."""
    for path in trained.iterdir():
        if path.suffix in (".safetensors", ".py") or path.name.endswith(".index.json"):
            try:
                os.link(path, folder / path.name)
            except OSError:
                shutil.copy(path, folder)
            (folder / path.name).chmod(0o644)
    config = read_json(trained / "config.json")
    config["use_cache"] = read_json(base / "config.json").get("use_cache", True)
    write_json(folder / "config.json", config)


def merge_adapter(
    args: argparse.Namespace, folder: Path, shapes: TensorShapes, labels: list[str] | None
) -> dict:
    """Merge into the better base, save, and measure what the merge changed.

    A QLoRA adapter was trained on the 4-bit base. Which 16-bit base suits it, the original or
    the dequantized one, differs from model to model (unsloth-zoo pull request 810): measured.
    """
    free_at_once()
    tokenizer = load_tokenizer(args.base, args.settings["trust_remote_code"])
    batch = held_out(args.tokens, tokenizer, labels)
    loss_trained, _ = measure(adapted(args, "trained", labels), batch)
    gc.collect()  # that model refers to itself, and is not needed again
    record: dict = {"loss_trained": loss_trained, "loss_merged": {}}
    best, least = None, math.inf
    for base in bases(args.settings):
        if (found := merged_on(args, base, batch, shapes, labels)) is None:
            continue
        merged, loss, moved = found
        if best is None or loss < least:  # never true of a NaN
            best, least = merged, min(least, loss)
            record |= {"base": base} | moved
        record["loss_merged"][base] = loss
    if best is None:
        raise UserError("this model's layers change shape when dequantized; set merge.base: best.")
    check_drift(record, args.settings["merge"]["tolerance"])
    losses = record["loss_merged"].items()
    record["loss_merged"] = {base: x if math.isfinite(x) else None for base, x in losses}
    best.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes 0600, which other users cannot serve
    return record


def merged_on(
    args: argparse.Namespace,
    base: str,
    batch: Mapping,
    shapes: TensorShapes,
    labels: list[str] | None,
) -> tuple[PreTrainedModel, float, dict] | None:
    """The model merged into one base, its loss on `batch`, and how far a logit moved. None where
    layers of that base have other shapes."""
    model = adapted(args, base, labels)
    _, before = measure(model, batch)
    merged = model.merge_and_unload(safe_merge=True)
    if not same_shapes(merged, shapes):
        return None
    loss, after = measure(merged, batch)
    largest, moved = before.abs().max().item(), (after - before).abs().max().item()
    return merged, loss, {"max_logit": largest, "max_logit_difference": moved}


def adapted(args: argparse.Namespace, form: str, labels: list[str] | None) -> PeftModel:
    """The adapter on that form of its base."""
    from peft import PeftModel

    base = load_base(args, form, labels)
    # not peft's choice: a GPU if there is one, which some training has leased
    return PeftModel.from_pretrained(base, args.trained, torch_device="cpu")


def same_shapes(model: PreTrainedModel, shapes: TensorShapes) -> bool:
    """False for a dequantized GPT-2: its transposed layers come back as ordinary ones."""
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return all(shapes.get(name, shape) == shape for name, shape in found.items())


def bases(settings: dict) -> list[str]:
    """The bases to try. Only a quantized base has a dequantized form."""
    chosen = settings["merge"]["base"]
    if settings["method"] == "lora":
        return ["original"]
    return ["original", "dequantized"] if chosen == "best" else [chosen]


def load_base(args: argparse.Namespace, form: str, labels: list[str] | None) -> PreTrainedModel:
    """The base as it was trained on, dequantized from that, or in its original 16 bit."""
    trust, quantized = args.settings["trust_remote_code"], args.settings.get("quantization")
    if form == "original" or quantized is None:
        return load_for_inference(args.base, trust, labels=labels)
    model = load_for_inference(args.base, trust, quantized)
    return model.dequantize() if form == "dequantized" else model


def held_out(tokens: Path, tokenizer, labels: list[str] | None) -> Mapping:
    """Some validation rows, or training rows where there is no validation split."""
    tokenizer.padding_side = "right"
    rows = open_tokens(tokens / "validation")
    rows = rows if len(rows) else open_tokens(tokens / "train")
    collate = RowCollator(tokenizer) if labels is None else classes().LabelCollator(tokenizer)
    return collate([rows[i] for i in range(rows_compared(rows["length"][:]))])


def classes() -> ModuleType:
    """Of classifiers only: it imports the Trainer, which takes as long as all the rest."""
    from finetune import classification

    return classification


@torch.inference_mode()
def measure(model: torch.nn.Module, batch: Mapping) -> tuple[float, torch.Tensor]:
    """Loss per supervised token, and the logits there: (tokens, vocabulary). Of a classifier:
    loss per row, and (rows, classes)."""
    supervised = batch.get("shift_labels")
    score = classes().class_scores if supervised is None else batch_scores
    scores, logits = score(model.eval(), batch)
    nll, count, _ = scores.sum(0).tolist()
    return nll / count, (logits if supervised is None else logits[supervised != IGNORED]).float()


def check_drift(record: dict, tolerance: float) -> None:
    """A merged model that is worse than what was trained must not be served."""
    trained, merged = record["loss_trained"], record["loss_merged"][record["base"]]
    allowed = max(trained * (1 + tolerance), trained + NEGLIGIBLE)
    if not merged <= allowed:  # a NaN is worse too
        raise UserError(
            f"on held-out rows the merged model's loss is {merged:.4f}, the trained one's "
            f"{trained:.4f}: more than {tolerance:.0%} worse. Serve the adapter in trained/ on its "
            "base instead, train with `method: lora`, or raise merge.tolerance."
        )
    change, largest = record["max_logit_difference"], record["max_logit"]
    if not change <= tolerance * largest:
        raise UserError(
            f"merging moved a logit by {change:.2f}, where the largest is {largest:.2f}: more "
            f"than {tolerance:.0%}. The merge went wrong; serve the adapter on its base instead."
        )


if __name__ == "__main__":
    run_script(main)
