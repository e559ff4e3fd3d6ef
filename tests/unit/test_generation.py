"""Greedy answers: batching changes none of them, and each ends where the model stopped."""

import pytest
import torch
from transformers import GenerationConfig

from chats import family
from finetune.generation import Answer, answer, read_answer, stop_ids
from finetune.modeling import load_for_inference
from finetune.tokenizer import load_tokenizer
from scarce import scarce_memory

PROMPTS = [
    "turn on the light",
    "what",
    "<|im_start|>user\nset the kitchen to two<|im_end|>\n<|im_start|>assistant\n",
    "no one in a bedroom and a kitchen is in the light of two",
    "yes",
    "turn on the lamp",
]
LENGTH = 12
THOUGHT = "<think>\nhm\nso\n</think>\n\n"
CALLED = f"{THOUGHT} to=fcommentary1"


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model)


@pytest.fixture(scope="module")
def model(tiny_model):
    """In fp32, with sharper logits, so that no two are close."""
    model = load_for_inference(tiny_model, False).float()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = torch.randn_like(parameter) * 0.3
    model.tie_weights()
    return model


def texts(model, tokenizer, prompts, size):
    return answer(model, tokenizer, prompts, max_new_tokens=LENGTH, batch_size=size)


def test_batches_answer_like_single_prompts_and_in_order(model, tokenizer):
    alone = [texts(model, tokenizer, [prompt], 1)[0] for prompt in PROMPTS]
    assert len({a.text for a in alone}) == len(PROMPTS)
    for size in (2, 4, 6, 100):
        assert texts(model, tokenizer, PROMPTS, size) == alone
    assert texts(model, tokenizer, PROMPTS[::-1], 4) == alone[::-1]


def test_a_batch_that_memory_does_not_suffice_for_is_halved(model, tokenizer):
    alone = texts(model, tokenizer, PROMPTS, 1)
    with scarce_memory(model, rows=2) as failures:
        assert texts(model, tokenizer, PROMPTS, 6) == alone
    assert failures == [6, 3, 3]


def test_answers_are_greedy_and_hold_no_prompt(model, tokenizer):
    ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    expected = []
    for _ in range(LENGTH):
        following = model(ids).logits[0, -1].argmax()
        if following == tokenizer.eos_token_id:
            break
        expected.append(following.item())
        ids = torch.cat([ids, following.view(1, 1)], dim=1)
    given = texts(model, tokenizer, PROMPTS[:1], 1)[0]
    assert given.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert given.tokens == len(expected)


def test_an_answer_stops_at_the_end_token_and_not_before(model, tokenizer, monkeypatch):
    """The third token of an answer is made the end token."""
    open_end = texts(model, tokenizer, PROMPTS, 6)
    assert [a.stopped for a in open_end] == [False] * 6
    assert {a.tokens for a in open_end} == {LENGTH}
    batch = tokenizer(PROMPTS[0], return_tensors="pt")
    new = model.generate(**batch, do_sample=False, max_new_tokens=LENGTH)[0, -LENGTH:].tolist()
    third = new[2]
    stops = GenerationConfig(eos_token_id=[500, third], pad_token_id=0)
    monkeypatch.setattr(model, "generation_config", stops)
    given = texts(model, tokenizer, PROMPTS, 6)
    end = new.index(third)
    assert given[0] == Answer(tokenizer.decode(new[:end], skip_special_tokens=True), end, True)
    # the others go on, and are not cut by the padding of the first
    assert any(not a.stopped and a.tokens == LENGTH for a in given[1:])


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([287, 2, 0, 0], Answer("yes", 1, True)),
        ([287, 287], Answer("yesyes", 2, False)),
        ([287, 287, 2], Answer("yesyes", 2, True)),  # at the last token that was allowed
        ([2, 2, 2], Answer("", 0, True)),
        ([287, 0, 287, 2], Answer("yesyes", 3, True)),  # a pad token in an answer is no end
        ([], Answer("", 0, False)),
    ],
)
def test_reading_an_answer(tokenizer, ids, expected):
    assert tokenizer.convert_tokens_to_ids("yes") == 287
    assert read_answer(ids, {2}, tokenizer) == expected


FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (f"{FINAL}yes<|return|>", "yes"),
        (f"{ANALYSIS}hm\nso<|end|><|start|>assistant{FINAL}yes<|return|>", f"{THOUGHT}yes"),
        (f"{ANALYSIS}hm\nso", "<think>\nhm\nso"),  # at max_new_tokens
        (f"{ANALYSIS}one{NEXT}{ANALYSIS}two", "<think>\none\n</think>\n\n<think>\ntwo"),
        (f"{ANALYSIS}hm\nso{NEXT} to=f<|channel|>commentary<|message|>1<|call|>", CALLED),
        (f"{FINAL}about the analysis channel<|return|>", "about the analysis channel"),
        ("yes<|return|>", "yes"),
    ],
)
def test_channels_of_harmony_are_a_thought_and_an_answer(written, expected):
    tokenizer = family("harmony")
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    stops = set(tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"]))
    assert read_answer(ids, stops, tokenizer).text == expected


def test_a_thought_of_gemma_4_is_read_before_its_special_tokens_are_dropped():
    tokenizer = family("gemma3")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel>", "<channel|>"]})
    ids = tokenizer("<|channel>thought\nhm<channel|>yes<eos>", add_special_tokens=False)[
        "input_ids"
    ]
    text = read_answer(ids, {tokenizer.eos_token_id}, tokenizer).text
    assert text == "<think>\nhm\n</think>\n\nyes"


def test_stop_ids_are_one_or_several(model, monkeypatch):
    assert stop_ids(model) == {2}
    monkeypatch.setattr(model.generation_config, "eos_token_id", [2, 7])
    assert stop_ids(model) == {2, 7}


def test_no_prompts_no_answers(model, tokenizer):
    assert texts(model, tokenizer, [], 4) == []


def test_a_penalty_or_beams_of_the_model_change_no_answer(model, tokenizer):
    plain = texts(model, tokenizer, PROMPTS, 3)
    model.generation_config.update(repetition_penalty=1.5, num_beams=2, min_new_tokens=9)
    assert texts(model, tokenizer, PROMPTS, 3) == plain


def test_an_answer_ends_where_the_context_does(model, tokenizer):
    """256 positions: GPT-2 and its like fail beyond the last one. The room of one prompt is not
    that of the others in its batch."""
    prompts = ["turn on " * 60, "what", "turn on " * 62]
    room = [256 - len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert room == [17, 255, 9]
    given = answer(model, tokenizer, prompts, max_new_tokens=20, batch_size=3)
    assert [(a.tokens, a.stopped) for a in given] == [(17, False), (20, False), (9, False)]
    assert given == [
        answer(model, tokenizer, [prompt], max_new_tokens=20, batch_size=1)[0] for prompt in prompts
    ]


@pytest.mark.parametrize(
    ("end", "room", "tokens"), [("", 1, 1), ("ayes", 0, None), ("ayesyes", -1, None)]
)
def test_a_prompt_that_fills_the_context_gets_no_answer(model, tokenizer, end, room, tokens):
    prompts = ["what", "turn on " * 64 + end]
    assert 256 - len(tokenizer(prompts[1])["input_ids"]) == room
    given = answer(model, tokenizer, prompts, max_new_tokens=20, batch_size=2)
    assert given[0].tokens == 20
    assert (given[1].tokens if given[1] else None) == tokens
