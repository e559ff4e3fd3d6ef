"""Text to token ids and labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from finetune.chat import TemplateError
from finetune.spans import Piece
from finetune.tokenizer import adds_bos

IGNORED = -100
"""Label of a position that the loss skips, as in torch.nn.functional.cross_entropy."""


@dataclass(frozen=True)
class Example:
    """One row ready for training: ids and labels of the same length."""

    input_ids: list[int]
    labels: list[int]


class TextEncoder:
    """A tokenizer, and what has to be known about it. That is found out here, once: a tokenizer
    that is changed needs a new one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.ends = end_tokens(tokenizer)
        self.adds_bos = adds_bos(tokenizer)
        self.special = tokenizer.num_special_tokens_to_add()
        """How many tokens it adds to any text."""
        self.joins = joins_cleanly(tokenizer)

    def encode(self, examples: list[list[Piece]]) -> Iterator[Example]:
        """Token ids, and labels that hold the tokens of the pieces trained on and IGNORED
        elsewhere.

        The template writes the special tokens, so the tokenizer adds none: one BOS at most. EOS is
        added, and supervised, where the last piece ends without a marker of its own. No token
        reaches over the end of a prompt: a server tokenizes the prompt alone.
        """
        if self.joins:
            texts = [text for pieces in examples for text, _ in pieces]
            ids = iter(tokenize(self.tokenizer, texts))
            parts = ([next(ids) for _ in pieces] for pieces in examples)
        else:
            parts = (careful(self.tokenizer, pieces) for pieces in examples)
        for pieces, encoded in zip(examples, parts, strict=True):
            yield self.joined(encoded, [learned for _, learned in pieces])

    def joined(self, parts: list[list[int]], learned: list[bool]) -> Example:
        """The pieces of one example in one."""
        ids: list[int] = []
        labels: list[int] = []
        for part, taught in zip(parts, learned, strict=True):
            ids += part
            labels += part if taught else [IGNORED] * len(part)
        if not ids or ids[-1] not in self.ends:
            ids.append(self.eos)
            labels.append(self.eos if learned[-1:] == [True] else IGNORED)
        if ids[:2] == [self.bos] * 2:
            raise TemplateError("the chat template writes BOS twice; remove one from the template")
        labels[0] = IGNORED  # nothing comes before it, and in a packed row something strange does
        return Example(ids, labels)

    def parts(self, ids: list[int], size: int) -> list[Example]:
        """Plain text, all of it trained on, in examples of at most `size` tokens.

        BOS comes before it if the tokenizer is used to that, EOS after it. Each example starts
        with the last token of the one before, so that every token is predicted once, and from
        something.
        """
        ids = [*([self.bos] if self.adds_bos else []), *ids, self.eos]
        parts = [ids[at : at + size] for at in range(0, max(1, len(ids) - 1), size - 1)]
        return [Example(part, [IGNORED, *part[1:]]) for part in parts]


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that can end a turn: EOS and the model's other special tokens (<|eot_id|>, …).

    Not the unknown token: it can be the last letter of an answer.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = set(tokenizer.all_special_ids) | {index for index, token in added if token.special}
    return frozenset(special - {tokenizer.unk_token_id} | {tokenizer.eos_token_id})


def joins_cleanly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether pieces can be tokenized one by one: no mark is put before the start of a text, as
    the tokenizers of Llama 2 and their like do, and no token eats the spaces beside it, as the
    <|end|> of Phi does."""
    added = tokenizer.added_tokens_decoder.values()
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return False
    whole, parts = tokenize(tokenizer, ["\ny", "x y"]), tokenize(tokenizer, ["\n", "y", "x", " y"])
    return whole == [parts[0] + parts[1], parts[2] + parts[3]]


def tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], with_special: bool = False
) -> list[list[int]]:
    """Ids of each text, as they are: nothing is cut or padded, nor added if not asked for.

    This calls the Rust tokenizer beneath: the one above it spends as much time on what is not
    needed here, such as offsets.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=with_special)]


def careful(tokenizer: PreTrainedTokenizerBase, pieces: list[Piece]) -> list[list[int]]:
    """Ids of each piece, for tokenizers to which a piece is not the same alone.

    The text is tokenized up to the end of each piece, as a server does with each prompt. A piece
    that changes tokens of the one before it has to be tokenized alone.
    """
    texts = [text for text, _ in pieces]
    before: list[int] = []
    parts = []
    for text, ids in zip(texts, tokenize(tokenizer, list(accumulate(texts))), strict=True):
        grown = ids[: len(before)] == before
        parts.append(ids[len(before) :] if grown else tokenize(tokenizer, [text])[0])
        before = ids
    return parts


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
