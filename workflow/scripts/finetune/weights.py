"""Saved weights, checked from the headers of their safetensors files: no tensor is read."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from safetensors import safe_open

from finetune.cli import UserError, run_again

TensorShapes = dict[str, tuple[int, ...]]


def saved_shapes(folder: Path) -> TensorShapes:
    """Names and shapes of all tensors in the safetensors files of a folder."""
    shapes: TensorShapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle, no dict
                shapes[current_name(name)] = tuple(file.get_slice(name).get_shape())
    return shapes


def found_shapes(folder: Path, expected: TensorShapes) -> TensorShapes:
    """Those of the files of a folder, by the names expected of the architecture.

    Of a model that sees images too, as Qwen 3.5 does, transformers takes the part that reads. It
    reads that with the prefix of the whole and without (conversion_mapping.py, qwen3_5_text), and
    writes it with the prefix unless the model was dequantized.
    """

    def known(name: str) -> str:
        short = name.replace("model.language_model.", "model.", 1)
        return short if name not in expected and short in expected else name

    return {known(name): shape for name, shape in saved_shapes(folder).items()}


def current_name(name: str) -> str:
    """The first BERT models were saved with TensorFlow's names, which transformers still reads."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


def expected_shapes(
    folder: Path, trust_remote_code: bool, labels: list[str] | None = None
) -> tuple[TensorShapes, dict[str, str]]:
    """What the architecture of a model folder has, and the tied pairs of which one is enough.

    Names are those of the files. In memory, transformers calls the head of GPT-NeoX otherwise
    and joins the experts of a mixture.
    """
    from transformers.core_model_loading import revert_weight_conversion

    from finetune.architecture import outline

    model = outline(folder, trust_remote_code, labels)
    tensors = model.state_dict()
    saved = revert_weight_conversion(model, tensors)
    tied: dict[str, str] = {}
    for pair in model.all_tied_weights_keys.items() if model.config.tie_word_embeddings else ():
        one, other = (next(iter(revert_weight_conversion(model, {n: tensors[n]}))) for n in pair)
        tied |= {one: other, other: one}
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}, tied


def verify(
    folder: Path, expected: TensorShapes, tied: dict[str, str], trained: Path
) -> dict[str, int]:
    """Raise UserError unless every expected tensor is there, whole, and nothing else is. What the
    folder was made of, `trained`, is what to make again."""
    found = found_shapes(folder, expected)
    faults = list(differences(found, expected, tied))
    if faults:
        raise UserError(
            f"the model made of {trained} is not whole: {'; '.join(faults[:3])} "
            f"({len(faults)} faults in all). {run_again(f'--forcerun {trained}')} to train anew."
        )
    return {"tensors": len(found), "parameters": sum(prod(shape) for shape in found.values())}


def differences(found: TensorShapes, expected: TensorShapes, tied: dict[str, str]) -> Iterator[str]:
    """What is wrong, one text per tensor."""
    for name, shape in expected.items():
        if name not in found:
            if tied.get(name) not in found:
                yield f"{name} is missing"
        elif prod(found[name]) == 0 and prod(shape) != 0:
            yield f"{name} is empty"
        elif found[name] != shape:
            yield f"{name} is {found[name]}, not {shape}"
    yield from (f"{name} is unknown to the architecture" for name in found if name not in expected)
