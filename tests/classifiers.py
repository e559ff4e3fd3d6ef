"""What tests of classification build: a tiny encoder, and labelled rows as tokenize_data does."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from lint_record import SPLIT, WHOLE
from project import ROWS, TEXT

LABELS = ["off", "on", "question"]


def label_of(prompt: str) -> str:
    return prompt.split()[1] if prompt.startswith("turn") else "question"


LABELLED = [(row["prompt"], label_of(row["prompt"])) for row in ROWS]
"""15 rows of off, 15 of on, 10 questions, of different lengths."""


def make_tiny_bert(folder: Path) -> None:
    """Two layers, with a pooler and no head, and a tokenizer that has no EOS."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {
        word: index for index, word in enumerate([*special, *dict.fromkeys(TEXT.split())])
    }
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{word.strip('[]').lower()}_token": word for word in special}
    PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    shape |= {"num_hidden_layers": 2, "max_position_embeddings": 64, "initializer_range": 0.1}
    config = BertConfig(vocab_size=len(vocabulary), **shape)
    BertModel(config).save_pretrained(folder)


def labelled_rows(tokenizer, pairs: list[tuple[str, str]] = LABELLED) -> list[dict]:
    rows = []
    for index, (text, label) in enumerate(pairs):
        ids = tokenizer(text)["input_ids"]
        row = {"id": f"r{index}", "input_ids": ids, "labels": LABELS.index(label)}
        rows.append(row | {"length": len(ids), "row": index})
    return rows


def make_labelled_tokens(folder: Path, tokenizer) -> None:
    """A token folder with lint.json: 28 training rows, 6 of validation, 6 of test."""
    from datasets import Dataset

    mixed = [LABELLED[i * 7 % 40] for i in range(40)]
    splits = {"train": mixed[:28], "validation": mixed[28:34], "test": mixed[34:]}
    lint: dict = {**WHOLE, "task": "sequence-classification", "labels": LABELS}
    for split, pairs in splits.items():
        rows = labelled_rows(tokenizer, pairs)
        # open_tokens numbers the rows
        Dataset.from_list(rows).remove_columns("row").save_to_disk(folder / split)
        lengths = [row["length"] for row in rows]
        counted = dict.fromkeys(("rows", "examples", "sequences"), len(rows))
        lint[split] = SPLIT | counted | {"tokens": sum(lengths), "longest": max(lengths)}
    counts = Counter(label for _, label in splits["train"])
    lint["label_counts"] = [counts[label] for label in LABELS]
    (folder / "lint.json").write_text(json.dumps(lint))
