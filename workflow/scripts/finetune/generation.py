"""Greedy answers to prompts, in batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.encoding import tokenize
from finetune.halving import in_halves
from finetune.sampling import by_length
from finetune.shapes import context_of
from finetune.thoughts import readable


@dataclass(frozen=True)
class Answer:
    """What a model wrote after a prompt."""

    text: str
    tokens: int
    stopped: bool
    """Whether it ended by itself, rather than at max_new_tokens or the end of the context."""


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    *,
    max_new_tokens: int,
    batch_size: int,
) -> list[Answer | None]:
    """Answers in the order of the prompts, which are rendered text with special tokens in it.
    None for a prompt that leaves no room in the model's context.

    Batches are padded on the left, so that every answer starts where its prompt ends, and hold
    prompts of like length, so that little is padded.
    """
    make_greedy(model)
    tokenizer.padding_side = "left"
    room = [context(model) - len(ids) for ids in tokenize(tokenizer, prompts)]
    answers: dict[int, Answer] = {}

    def continued(chosen: list[int]) -> list[list[int]]:
        limit = min(max_new_tokens, room[chosen[0]])
        return continuations(model, tokenizer, [prompts[i] for i in chosen], limit)

    for batch in batches(room, max_new_tokens, batch_size):
        for chosen, found in in_halves(continued, batch):
            for index, ids in zip(chosen, found, strict=True):
                answers[index] = read_answer(ids, stop_ids(model), tokenizer)
    return [answers.get(index) for index in range(len(prompts))]


def continuations(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], limit: int
) -> list[list[int]]:
    """Ids that follow each prompt, up to `limit` of them."""
    batch = tokenizer(
        prompts,
        add_special_tokens=False,
        padding=True,
        return_tensors="pt",
        return_token_type_ids=False,
    ).to(model.device)
    output = model.generate(**batch, max_new_tokens=limit)
    return output[:, batch["input_ids"].shape[1] :].tolist()


def batches(room: list[int], wanted: int, size: int) -> Iterator[list[int]]:
    """Prompts to answer together, by the room of each. One near the end of the context comes
    alone: its answer ends sooner than those of others."""
    wide = [index for index, tokens in enumerate(room) if tokens >= wanted]
    for chosen in by_length([-room[index] for index in wide], size):
        yield [wide[index] for index in chosen]
    yield from ([index] for index, tokens in enumerate(room) if 0 < tokens < wanted)


def make_greedy(model: PreTrainedModel) -> None:
    """Leave the model its end and pad tokens and nothing else of its generation config: with a
    repetition penalty or beams an answer is not the most likely token at each step. `generate`
    takes from there what its caller leaves out, so it is no use to pass another config."""
    own = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )


def context(model: PreTrainedModel) -> int:
    """Positions that the model has. Beyond them GPT-2 and its like cannot go."""
    return context_of(model.config) or sys.maxsize


def stop_ids(model: PreTrainedModel) -> set[int]:
    stops = model.generation_config.eos_token_id
    return set(stops) if isinstance(stops, list) else {stops}


def read_answer(ids: list[int], stops: set[int], tokenizer: PreTrainedTokenizerBase) -> Answer:
    """Cut at the first end token; what follows is padding."""
    end = next((i for i, token in enumerate(ids) if token in stops), None)
    kept = ids if end is None else ids[:end]
    return Answer(readable(tokenizer, kept), tokens=len(kept), stopped=end is not None)
