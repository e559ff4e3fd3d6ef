"""Tokenizers of each kind that is in use, small."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerFast

from chats import FAMILIES
from project import TEXT

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def byte_level(prefix_space: bool = False, normalizer=None, trim: bool = False) -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    core = Tokenizer(models.BPE())
    if normalizer is not None:
        core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    core.decoder = decoders.ByteLevel()
    if trim:
        core.post_processor = processors.ByteLevel(trim_offsets=True)
    core.train_from_iterator(
        [TEXT] * 4,
        BpeTrainer(
            vocab_size=384, special_tokens=SPECIAL, initial_alphabet=ALPHABET, show_progress=False
        ),
    )
    return core


def metaspace(scheme: str) -> Tokenizer:
    """Llama 2 and Mistral, as converted lately."""
    core = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()]
    )
    trainer = BpeTrainer(vocab_size=400, special_tokens=SPECIAL + BYTES, show_progress=False)
    core.train_from_iterator(TEXT.split(), trainer)
    return core


def prepend() -> Tokenizer:
    """Llama 2 and Phi 3, as converted first: a mark before each run of text."""
    core = metaspace("always")
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.pre_tokenizer = None
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return core


def unigram() -> Tokenizer:
    """T5, XLM-R."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.train_from_iterator(
        [TEXT],
        UnigramTrainer(
            vocab_size=80, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        ),
    )
    return core


def word_piece() -> Tokenizer:
    """BERT: all in lower case, and without white space."""
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    core.train_from_iterator(
        [TEXT], WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    )
    return core


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "trimmed offsets": lambda: byte_level(trim=True),
    "composed letters": lambda: byte_level(normalizer=normalizers.NFC()),
    "stripped": lambda: byte_level(normalizer=normalizers.Strip()),
    "prefix space": lambda: byte_level(prefix_space=True),
    "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
    "prepend": prepend,
    "unigram": unigram,
    "word piece": word_piece,
    "space eaters": byte_level,
}


def kind(name: str, template: str = FAMILIES["zephyr"][0], bos: bool = False):
    """A tokenizer with a chat template. `bos`: it puts one before plain text."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=KINDS[name](),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )
    eats = name == "space eaters"
    markers = [
        AddedToken(f"<|{role}|>", special=True, normalized=False, rstrip=eats)
        for role in ("system", "user", "assistant")
    ]
    tokenizer.add_tokens(markers)
    if bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    return tokenizer
