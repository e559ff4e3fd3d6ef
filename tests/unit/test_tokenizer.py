"""Repairs that make a tokenizer fit for training, and a stop token that generation knows."""

import pytest
from tokenizers import AddedToken, processors
from transformers import GenerationConfig, LlamaConfig, PretrainedConfig, PythonBackend

from fetch_model import add_stop_token
from finetune.cli import UserError
from finetune.encoding import IGNORED
from finetune.examples import encode_conversation
from finetune.tokenizer import TEMPLATES, load_tokenizer, repair
from project import tiny_tokenizer

CONFIG = LlamaConfig(max_position_embeddings=256)
TURNS = [{"role": "user", "content": "turn on"}, {"role": "assistant", "content": "yes"}]


def encode(tokenizer, messages):
    [example] = encode_conversation(tokenizer, messages)
    return example


def add(tokenizer, *tokens):
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])


@pytest.fixture
def tokenizer():
    """Fit for training, but for its length."""
    return tiny_tokenizer()


@pytest.fixture
def fix(tokenizer):
    """fix(pad token, chat template): the notes of repair()."""

    def fix(pad_token=None, chat_template=None, config=CONFIG):
        return repair(tokenizer, config, pad_token, chat_template)

    return fix


def test_a_sound_tokenizer_gets_its_length_alone(tokenizer, fix):
    before = tokenizer.pad_token, tokenizer.chat_template
    assert fix() == ["model_max_length unset -> 256"]
    assert tokenizer.model_max_length == 256
    assert (tokenizer.pad_token, tokenizer.chat_template) == before
    assert fix() == []


def test_a_length_that_is_set_stays(tokenizer, fix):
    tokenizer.model_max_length = 77
    assert fix() == []
    assert tokenizer.model_max_length == 77


def test_a_model_without_positions_sets_no_length(tokenizer, fix):
    assert fix(config=PretrainedConfig()) == []


def test_a_missing_pad_token_is_a_spare_one(tokenizer, fix):
    tokenizer.model_max_length = 256
    tokenizer.pad_token = None
    assert fix() == ["pad token None -> '<|endoftext|>' (EOS is '<|im_end|>')"]
    assert tokenizer.pad_token_id == 0


def test_spare_tokens_are_tried_in_order(tokenizer, fix):
    tokenizer.model_max_length = 256
    tokenizer.pad_token = None
    add(tokenizer, "<unk>", "<|finetune_right_pad_id|>")
    fix()
    assert tokenizer.pad_token == "<|finetune_right_pad_id|>"


def test_pad_that_equals_eos_is_replaced(tokenizer, fix):
    tokenizer.model_max_length = 256
    tokenizer.pad_token = tokenizer.eos_token
    assert fix() == ["pad token '<|im_end|>' -> '<|endoftext|>' (EOS is '<|im_end|>')"]


def test_pad_is_eos_where_nothing_is_spare(tokenizer, fix):
    tokenizer.model_max_length = 256
    tokenizer.eos_token, tokenizer.pad_token = "<|endoftext|>", None
    assert fix() == ["pad token None -> '<|endoftext|>' (EOS is '<|endoftext|>')"]
    assert fix() == []


def test_a_later_spare_token_is_better_than_eos(tokenizer, fix):
    """Bases of Qwen and GPT-2 end with <|endoftext|>, which comes before <unk> in our list."""
    tokenizer.model_max_length = 256
    tokenizer.eos_token = tokenizer.pad_token = "<|endoftext|>"
    add(tokenizer, "<unk>")
    assert fix() == ["pad token '<|endoftext|>' -> '<unk>' (EOS is '<|endoftext|>')"]


def test_the_users_pad_token_wins(tokenizer, fix):
    tokenizer.model_max_length = 256
    add(tokenizer, "<mine>")
    assert fix(pad_token="<mine>") == [
        "pad token '<|endoftext|>' -> '<mine>' (EOS is '<|im_end|>')"
    ]
    assert fix(pad_token="<mine>") == []


def test_a_pad_token_outside_the_vocabulary_is_refused(tokenizer, fix):
    add(tokenizer, "<|pad_here|>")
    size = len(tokenizer)
    with pytest.raises(UserError) as error:
        fix(pad_token="<pad>")
    assert str(error.value) == (
        "`pad_token: <pad>` under the model is not in its vocabulary. Set one that is "
        "(<|pad_here|>), or leave it out: a spare one is taken where the model has none."
    )
    assert len(tokenizer) == size  # a token added here would have no row in the embedding


def test_plain_is_text_newline_answer_eos(tokenizer, fix):
    assert fix(chat_template="plain")[-1] == "chat template: plain"
    example = encode(tokenizer, TURNS)
    assert tokenizer.decode(example.input_ids) == "turn on\nyes<|im_end|>"
    kept = [label for label in example.labels if label != IGNORED]
    assert tokenizer.decode(kept) == "yes<|im_end|>"


def test_chatml_by_name(tokenizer, fix):
    own = encode(tokenizer, TURNS)
    tokenizer.chat_template = None
    assert fix(chat_template="chatml")[-1] == "chat template: chatml"
    assert encode(tokenizer, TURNS) == own


def test_chatml_needs_its_markers(tokenizer, fix):
    vocabulary = tokenizer.get_vocab()
    tokenizer.get_vocab = lambda: {k: v for k, v in vocabulary.items() if k != "<|im_end|>"}
    with pytest.raises(UserError, match=r"needs <\|im_end\|> in the vocabulary; use `plain`"):
        fix(chat_template="chatml")


def test_a_template_file(tokenizer, fix, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(TEMPLATES["plain"].replace("\n", " → "), encoding="utf-8")
    assert fix(chat_template=str(path))[-1] == f"chat template: {path}"
    assert tokenizer.decode(encode(tokenizer, TURNS).input_ids) == "turn on → yes<|im_end|>"


@pytest.mark.parametrize("name", ["chatlm", "folder"])
def test_a_template_that_is_no_name_and_no_file_is_refused(fix, tmp_path, monkeypatch, name):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        fix(chat_template=name)
    assert (
        str(error.value) == f"chat_template '{name}' is neither a file nor one of: chatml, plain."
    )


@pytest.fixture
def llama(tokenizer):
    """As Llama's: plain text gets a BOS, chat templates write it or leave it out."""
    add(tokenizer, "<s>")
    tokenizer.bos_token = "<s>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


def test_a_template_without_bos_gets_it_once(llama, fix):
    own = llama.chat_template
    assert "the chat template left out BOS; added" in fix()
    assert llama.chat_template == "{{ bos_token }}" + own
    assert "the chat template left out BOS; added" not in fix()
    ids = encode(llama, TURNS).input_ids
    assert ids[0] == llama.bos_token_id
    assert ids.count(llama.bos_token_id) == 1


def test_a_named_template_gets_bos_too(llama, fix):
    assert fix(chat_template="plain")[-2:] == [
        "chat template: plain",
        "the chat template left out BOS; added",
    ]
    assert llama.decode(encode(llama, TURNS).input_ids) == "<s>turn on\nyes<|im_end|>"


def test_a_template_with_bos_stays(llama, fix):
    llama.chat_template = written = "{{ bos_token }}" + llama.chat_template
    fix()
    assert llama.chat_template == written


def test_each_of_several_named_templates_gets_bos_if_it_lacks_it(llama, fix):
    own = llama.chat_template
    llama.chat_template = {"default": own, "tool_use": "{{ bos_token }}" + own}
    assert "the chat template left out BOS; added" in fix()
    assert llama.chat_template == dict.fromkeys(("default", "tool_use"), "{{ bos_token }}" + own)
    assert fix() == []


def test_a_template_that_cannot_be_rendered_ends_in_one_clear_line(llama, fix, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[9].content }}")
    with pytest.raises(UserError, match="the chat template refuses a row with the turns user: "):
        fix(chat_template=str(path))


def test_a_template_with_a_syntax_error_is_named_with_its_line(fix, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{% for message in messages %}\n{{ message.content }")
    with pytest.raises(UserError) as caught:
        fix(chat_template=str(path))
    assert str(caught.value) == f"{path}:2: no Jinja template: unexpected '}}'"


def test_a_tokenizer_that_adds_no_bos_needs_none(tokenizer, fix):
    """Qwen has a BOS token and never writes it."""
    written = tokenizer.chat_template = "x" + tokenizer.chat_template
    fix()
    assert tokenizer.chat_template == written


def test_no_template_gets_no_bos(llama, fix):
    llama.chat_template = None
    fix()
    assert llama.chat_template is None


def test_no_eos_is_refused(tokenizer, fix):
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"could never stop\. Choose another model, or add `eos_"):
        fix()


class Slow(PythonBackend):
    """A tokenizer in Python."""

    vocab_size = 1

    def get_vocab(self):
        return {"</s>": 0}

    def _tokenize(self, text):
        return []

    def _convert_token_to_id(self, token):
        return 0

    def _convert_id_to_token(self, index):
        return "</s>"


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(UserError, match=r"no fast \(Rust\) version, .* save this one once with"):
        repair(Slow(eos_token="</s>"), CONFIG, None, None)


def test_repairs_survive_saving(tokenizer, fix, tmp_path):
    tokenizer.pad_token = None
    fix(chat_template="plain")
    tokenizer.save_pretrained(tmp_path)
    saved = load_tokenizer(tmp_path)
    assert repair(saved, CONFIG, None, "plain") == ["chat template: plain"]
    assert (saved.pad_token, saved.model_max_length) == ("<|endoftext|>", 256)
    assert encode(saved, TURNS) == encode(tokenizer, TURNS)


@pytest.mark.parametrize(
    ("known", "expected", "notes"),
    [
        (0, [0, 2], ["generation stops at '<|im_end|>' too"]),
        ([0, 1], [0, 1, 2], ["generation stops at '<|im_end|>' too"]),
        (None, [2], ["generation stops at '<|im_end|>' too"]),
        (2, 2, []),
        ([0, 2], [0, 2], []),
    ],
)
def test_generation_stops_where_the_template_ends_a_turn(tokenizer, known, expected, notes):
    """A base model knows its EOS alone; trained on ChatML it ends with <|im_end|>."""
    tokenizer.eos_token = "<|endoftext|>"
    generation = GenerationConfig(eos_token_id=known)
    assert add_stop_token(generation, tokenizer) == notes
    assert generation.eos_token_id == expected


def test_generation_of_a_model_without_a_template_stops_at_eos(tokenizer):
    tokenizer.chat_template = None
    generation = GenerationConfig(eos_token_id=7)
    assert add_stop_token(generation, tokenizer) == []
    assert generation.eos_token_id == 7


def test_a_model_that_writes_no_text_needs_no_eos(tokenizer):
    tokenizer.model_max_length = 256
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no EOS token"):
        repair(tokenizer, CONFIG, None, None)
    assert repair(tokenizer, CONFIG, None, None, causal=False) == []


def test_no_token_to_pad_with(tokenizer, monkeypatch):
    tokenizer.eos_token = tokenizer.pad_token = None
    monkeypatch.setattr("finetune.tokenizer.SPARE_TOKENS", ())
    with pytest.raises(UserError, match="no token to pad with; set `pad_token` under the model"):
        repair(tokenizer, CONFIG, None, None, causal=False)
