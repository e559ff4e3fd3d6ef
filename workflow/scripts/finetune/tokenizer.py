"""Tokenizers made fit for training: a pad token, a length, a chat template."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.chat import Conversation, render
from finetune.cli import UserError
from finetune.shapes import context_of

SPARE_TOKENS = (
    "<pad>",
    "<|pad|>",
    "[PAD]",
    "<|finetune_right_pad_id|>",
    "<|endoftext|>",
    "<unk>",
)
UNSET_LENGTH = 1_000_000  # transformers writes 1e30 where a tokenizer says nothing

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # a line break right after a block would be trimmed, hence the expression
    "plain": (
        "{% for message in messages %}{{ message.content }}"
        "{{ eos_token if message.role == 'assistant' else '\n' }}{% endfor %}"
    ),
}
"""Named chat templates. `chatml` wants its markers in the vocabulary; `plain` wants nothing."""


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)


def repair(
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    pad_token: str | None,
    chat_template: str | None,
    causal: bool = True,
) -> list[str]:
    """Make a tokenizer fit for training, in place. Returns one line per change.

    A model that is not `causal` writes no text: its tokenizer needs no EOS.
    """
    if causal and tokenizer.eos_token is None:
        raise UserError(
            "the tokenizer has no EOS token, so a trained model could never stop. Choose another "
            "model, or add `eos_token` to its tokenizer_config.json."
        )
    if not tokenizer.is_fast:
        raise UserError(
            "the tokenizer has no fast (Rust) version, which tokenizes the rows here. Choose "
            "another model, or save this one once with a fast tokenizer (tokenizer.json)."
        )
    notes = [
        set_pad_token(tokenizer, pad_token),
        set_length(tokenizer, config),
        set_template(tokenizer, chat_template),
        write_bos(tokenizer),
    ]
    return [note for note in notes if note]


def set_pad_token(tokenizer: PreTrainedTokenizerBase, wanted: str | None) -> str | None:
    """Padding that is not EOS: a model whose padding is EOS is masked wrong by other tools."""
    vocabulary = tokenizer.get_vocab()
    if wanted is not None and wanted not in vocabulary:
        raise UserError(
            f"`pad_token: {wanted}` under the model is not in its vocabulary. "
            f"{in_place_of(wanted, tokenizer)}"
        )
    before = tokenizer.pad_token
    if wanted is None and before is not None and before != tokenizer.eos_token:
        return None
    spare = [t for t in SPARE_TOKENS if t in vocabulary and t != tokenizer.eos_token]
    tokenizer.pad_token = wanted or next(iter(spare), tokenizer.eos_token)
    if tokenizer.pad_token is None:
        raise UserError("the tokenizer has no token to pad with; set `pad_token` under the model.")
    if tokenizer.pad_token == before:
        return None
    return f"pad token {before!r} -> {tokenizer.pad_token!r} (EOS is {tokenizer.eos_token!r})"


def in_place_of(wanted: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """What to pad with. A whole vocabulary has something like any word: added tokens alone."""
    added = [token for token in tokenizer.get_added_vocab() if token != tokenizer.eos_token]
    close = get_close_matches(wanted, added, n=3, cutoff=0.4) or added[:3]
    others = f"Set one that is ({', '.join(close)}), or leave" if close else "Leave"
    return f"{others} it out: a spare one is taken where the model has none."


def set_length(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> str | None:
    context = context_of(config)
    if tokenizer.model_max_length < UNSET_LENGTH or context is None:
        return None
    tokenizer.model_max_length = context
    return f"model_max_length unset -> {context}"


def set_template(tokenizer: PreTrainedTokenizerBase, wanted: str | None) -> str | None:
    if wanted is None:
        return None
    text = TEMPLATES.get(wanted)
    if text is None:
        if not Path(wanted).is_file():
            known = ", ".join(TEMPLATES)
            raise UserError(f"chat_template {wanted!r} is neither a file nor one of: {known}.")
        text = Path(wanted).read_text(encoding="utf-8")
        check_syntax(text, wanted)
    if wanted == "chatml" and "<|im_end|>" not in tokenizer.get_vocab():
        raise UserError("chat_template chatml needs <|im_end|> in the vocabulary; use `plain`.")
    tokenizer.chat_template = text
    return f"chat template: {wanted}"


def check_syntax(template: str, name: str) -> None:
    """Compile a template as transformers does."""
    try:
        render_jinja_template([[]], chat_template=template)
    except TemplateSyntaxError as error:
        raise UserError(f"{name}:{error.lineno}: no Jinja template: {error.message}") from None
    except Exception:  # it wants turns, which is its right
        return


def write_bos(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Let the template write the BOS that the tokenizer adds to plain text.

    A rendered conversation is tokenized without special tokens, here and by every server, so
    a template that leaves BOS out would train and serve a model without it.
    """
    template = tokenizer.chat_template
    if not adds_bos(tokenizer) or template is None:
        return None
    named = template if isinstance(template, dict) else {"default": template}
    mended = {
        name: text if writes_bos(tokenizer, text) else "{{ bos_token }}" + text
        for name, text in named.items()
    }
    if mended == named:
        return None
    tokenizer.chat_template = mended if template is named else mended["default"]
    return "the chat template left out BOS; added"


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether plain text gets a BOS."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def writes_bos(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    turn = Conversation([{"role": "user", "content": "a"}])
    [text] = render(tokenizer, [(turn, 1, False)], {"chat_template": template}).values()
    return text.startswith(tokenizer.bos_token)
