"""Greedy answers to prompts, in batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answer:
    """What a model wrote after a prompt."""

    text: str
    tokens: int
    stopped: bool
    """Whether it ended by itself, rather than at max_new_tokens."""


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    *,
    max_new_tokens: int,
    batch_size: int,
) -> list[Answer]:
    """Answers in the order of the prompts, which are rendered text with special tokens in it.

    Batches are padded on the left, so that every answer starts where its prompt ends, and hold
    prompts of like length, so that little is padded.
    """
    tokenizer.padding_side = "left"
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = tokenizer(
            [prompts[i] for i in chosen],
            add_special_tokens=False,
            padding=True,
            return_tensors="pt",
            return_token_type_ids=False,
        ).to(model.device)
        output = model.generate(**batch, do_sample=False, max_new_tokens=max_new_tokens)
        new = output[:, batch["input_ids"].shape[1] :]
        for index, ids in zip(chosen, new.tolist(), strict=True):
            answers[index] = read_answer(ids, stop_ids(model), tokenizer)
    return [answers[index] for index in range(len(prompts))]


def stop_ids(model: PreTrainedModel) -> set[int]:
    stops = model.generation_config.eos_token_id
    return set(stops) if isinstance(stops, list) else {stops}


def read_answer(ids: list[int], stops: set[int], tokenizer: PreTrainedTokenizerBase) -> Answer:
    """Cut at the first end token; what follows is padding."""
    end = next((i for i, token in enumerate(ids) if token in stops), None)
    kept = ids if end is None else ids[:end]
    text = tokenizer.decode(kept, skip_special_tokens=True)
    return Answer(text, tokens=len(kept), stopped=end is not None)
