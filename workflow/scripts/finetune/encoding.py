"""Text to token ids and labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from transformers import PreTrainedTokenizerBase

from finetune.chat import Piece, TemplateError

IGNORED = -100
"""Label of a position that the loss skips, as in torch.nn.functional.cross_entropy."""

Span = tuple[int, int]


@dataclass(frozen=True)
class Example:
    """One row ready for training: ids and labels of the same length."""

    input_ids: list[int]
    labels: list[int]


def encode_pieces(
    tokenizer: PreTrainedTokenizerBase, examples: list[list[Piece]]
) -> Iterator[Example]:
    """Token ids, and labels that hold the tokens of the pieces trained on and IGNORED elsewhere.

    The template writes the special tokens, so the tokenizer adds none: one BOS at most. EOS is
    added, and supervised, where the last piece ends without a marker of its own. No token reaches
    over the end of a prompt: a server tokenizes the prompt alone.
    """
    if joins_cleanly(tokenizer):
        ids = iter(tokenize(tokenizer, [text for pieces in examples for text, _ in pieces]))
        parts = ([(next(ids), learned) for _, learned in pieces] for pieces in examples)
    else:
        parts = (careful(tokenizer, pieces) for pieces in examples)
    for pieces, encoded in zip(examples, parts, strict=True):
        yield finish(tokenizer, encoded, learned=pieces[-1][1])


@lru_cache
def joins_cleanly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether pieces can be tokenized one by one: no mark is put before the start of a text, as
    the tokenizers of Llama 2 and their like do."""
    whole, parts = tokenize(tokenizer, ["\ny", "x y"]), tokenize(tokenizer, ["\n", "y", "x", " y"])
    return whole == [parts[0] + parts[1], parts[2] + parts[3]]


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Ids of each text, as they are: nothing is added, cut or padded.

    This calls the Rust tokenizer beneath: the one above it spends as much time on what is not
    needed here, such as offsets.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)]


def careful(
    tokenizer: PreTrainedTokenizerBase, pieces: list[Piece]
) -> list[tuple[list[int], bool]]:
    """Ids of each piece, for tokenizers that mark the start of a text.

    The text is tokenized as a whole and cut between tokens. That is right if each prompt, alone,
    gives the same ids, which is verified; else pieces are tokenized one by one.
    """
    text = "".join(text for text, _ in pieces)
    edges = [0, *accumulate(len(text) for text, _ in pieces)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    starts = [next((i for i, (s, _) in enumerate(offsets) if s >= e), len(ids)) for e in edges]
    shared = any(start < edge < end for edge in edges for start, end in offsets)
    prompts = [place for place, (_, learned) in enumerate(pieces) if learned]
    alone = tokenize(tokenizer, [text[: edges[place]] for place in prompts])
    if shared or alone != [ids[: starts[place]] for place in prompts]:
        cuts = tokenize(tokenizer, [text for text, _ in pieces])
    else:
        cuts = [ids[left:right] for left, right in pairwise(starts)]
    return list(zip(cuts, (learned for _, learned in pieces), strict=True))


def finish(
    tokenizer: PreTrainedTokenizerBase, encoded: list[tuple[list[int], bool]], learned: bool
) -> Example:
    """Join the pieces of one example."""
    ids = [token for part, _ in encoded for token in part]
    labels: list[int] = []
    for part, taught in encoded:
        labels += part if taught else [IGNORED] * len(part)
    if not ids or ids[-1] not in end_tokens(tokenizer):
        ids.append(tokenizer.eos_token_id)
        labels.append(tokenizer.eos_token_id if learned else IGNORED)
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        raise TemplateError("the chat template writes BOS twice; remove one from the template")
    labels[0] = IGNORED  # nothing comes before it, and in a packed row something strange does
    return Example(ids, labels)


@lru_cache
def end_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that can end a turn: EOS and the model's other special tokens (<|eot_id|>, …).

    Not the unknown token: it can be the last letter of an answer.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = set(tokenizer.all_special_ids) | {index for index, token in added if token.special}
    return frozenset(special - {tokenizer.unk_token_id} | {tokenizer.eos_token_id})


def encode_text(tokenizer: PreTrainedTokenizerBase, ids: list[int], size: int) -> list[Example]:
    """Plain text, all of it trained on, in examples of at most `size` tokens.

    BOS comes before it if the tokenizer is used to that, EOS after it. Each example starts with
    the last token of the one before, so that every token is predicted once, and from something.
    """
    bos = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
    ids = [*bos, *ids, tokenizer.eos_token_id]
    parts = [ids[at : at + size] for at in range(0, max(1, len(ids) - 1), size - 1)]
    return [Example(part, [IGNORED, *part[1:]]) for part in parts]


@lru_cache
def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def truncated(example: Example, size: int, side: str, bos: int | None) -> Example:
    """Cut to `size` tokens at the `start` or `end`. BOS stays."""
    ids, labels = example.input_ids, example.labels
    if side == "end":
        return Example(ids[:size], labels[:size])
    kept = 1 if ids[0] == bos else 0
    first = len(ids) - size + kept
    labels = [*labels[:kept], *labels[first:]]
    labels[0] = IGNORED
    return Example([*ids[:kept], *ids[first:]], labels)
