"""Saved weights, checked from the headers of their safetensors files: no tensor is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from finetune.cli import UserError, run_again

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TensorShapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Expected:
    """What the architecture of a model folder has, under the names that files have today."""

    shapes: TensorShapes
    tied: dict[str, str]
    """Pairs of which one is enough."""
    model: PreTrainedModel
    """Its outline."""

    def known(self, names: Iterable[str]) -> dict[str, str]:
        """Each of `names`, and what it is called in `shapes`, if it is there.

        Files of one model come with several names: of before a change of transformers (BERT's
        gamma), with the prefix of a larger model (Qwen 3.5) or without that of a head (DeBERTa).
        transformers itself brings them to one.
        """
        today = {new: name for name, new in self.read(self.shapes).items()}
        read = self.read(name for name in names if name not in self.shapes)
        return {name: today.get(read.get(name), name) for name in names}

    def read(self, names: Iterable[str]) -> dict[str, str]:
        """As transformers renames when it loads, before it joins tensors (rename_source_key)."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        rules = [
            x for x in get_model_conversion_mapping(self.model) if isinstance(x, WeightRenaming)
        ]
        prefix, inside = self.model.base_model_prefix, self.model.state_dict()
        ordered = sorted(names, key=dot_natural_key)
        return {name: rename_source_key(name, rules, [], prefix, inside)[0] for name in ordered}


def saved_shapes(folder: Path) -> TensorShapes:
    """Names and shapes of all tensors in the safetensors files of a folder."""
    shapes: TensorShapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle, no dict
                shapes[name] = tuple(file.get_slice(name).get_shape())
    return shapes


def found_shapes(folder: Path, expected: Expected) -> TensorShapes:
    """Those of the files of a folder, by the names expected of the architecture."""
    found = saved_shapes(folder)
    known = expected.known(found)
    return {known[name]: shape for name, shape in found.items()}


def expected_shapes(
    folder: Path, trust_remote_code: bool, labels: list[str] | None = None
) -> Expected:
    """Of the architecture of a model folder.

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
    return Expected({name: tuple(tensor.shape) for name, tensor in saved.items()}, tied, model)


def verify(folder: Path, expected: Expected, trained: Path) -> dict[str, int]:
    """Raise UserError unless every expected tensor is there, whole, and nothing else is. What the
    folder was made of, `trained`, is what to make again."""
    found = found_shapes(folder, expected)
    faults = list(differences(found, expected))
    if faults:
        raise UserError(
            f"the model made of {trained} is not whole: {'; '.join(faults[:3])} "
            f"({len(faults)} faults in all). {run_again(f'--forcerun {trained}')} to train anew."
        )
    return {"tensors": len(found), "parameters": sum(prod(shape) for shape in found.values())}


def differences(found: TensorShapes, expected: Expected) -> Iterator[str]:
    """What is wrong, one text per tensor."""
    for name, shape in expected.shapes.items():
        if name not in found:
            if expected.tied.get(name) not in found:
                yield f"{name} is missing"
        elif prod(found[name]) == 0 and prod(shape) != 0:
            yield f"{name} is empty"
        elif found[name] != shape:
            yield f"{name} is {found[name]}, not {shape}"
    yield from (
        f"{name} is unknown to the architecture" for name in found if name not in expected.shapes
    )
