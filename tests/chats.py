"""Chat templates, each in the manner of a model family, and what tests of them share."""

from __future__ import annotations

import json

from tokenizers import AddedToken, processors

from finetune.chat import conversation
from finetune.encoding import IGNORED, TextEncoder
from finetune.spans import render_conversations
from finetune.tokenizer import TEMPLATES
from project import tiny_tokenizer

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\n' }}{% endif %}
{{- 'Today Date: ' + date_string | default('26 Jul 2024') + '\n\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson }}
    {%- elif message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
        {%- if tools is not none and loop.first %}{{- tools | tojson + '\n\n' }}{% endif %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last_query=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if '</think>' in message.content %}
            {%- set thought = message.content.split('</think>')[0].split('<think>')[-1] %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
        {%- endfor %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA3 = """\
{{- bos_token }}
{%- set first = '' %}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content + '\n\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
    {{- (first if loop.first else '') + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}
"""

HARMONY = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking and not messages[loop.index0 + 1:] %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary' }}
            {{- '<|message|>' + call.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions to=assistant<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + ('developer' if message.role == 'system' else message.role) }}
        {{- '<|message|>' + message.content }}
        {%- if tools and message.role == 'user' %}{{- tools | tojson }}{% endif %}
        {{- '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""

DEEPSEEK_R1 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}
    {%- else %}
        {{- ('<|User|>' if message.role == 'user' else '') + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\n' }}{% endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and messages[loop.index0 + 1:] | length < 2 %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] ' + message.content | tojson + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] ' + message.tool_calls | map(attribute='function') | list | tojson }}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool roles are supported') }}
    {%- endif %}
{%- endfor %}
"""

ZEPHYR = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}
    {%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\n' }}{% endif %}
{%- endfor %}
"""

PHI3 = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
{%- endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}
"""

BARE = """\
{%- for message in messages %}{{- message.role + ': ' + message.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{% endif %}
"""

FAMILIES = {
    # template, BOS, EOS
    "llama3": (LLAMA3, "<|begin_of_text|>", "<|end_of_text|>"),
    "qwen3": (QWEN3, None, "<|im_end|>"),
    "gemma3": (GEMMA3, "<bos>", "<eos>"),
    "harmony": (HARMONY, None, "<|return|>"),
    "deepseek-r1": (DEEPSEEK_R1, "<s>", "</s>"),
    "mistral": (MISTRAL, "<s>", "</s>"),
    "zephyr": (ZEPHYR, None, "</s>"),
    "phi3": (PHI3, None, "<|endoftext|>"),
    "bare": (BARE, None, "</s>"),
    "chatml": (TEMPLATES["chatml"], None, "<|im_end|>"),
    "plain": (TEMPLATES["plain"], None, "</s>"),
}
MARKERS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|user|>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>", "<|assistant|>"),
    *("<|system|>", "<|end|>", "<|User|>", "<|Assistant|>"),
)
SPACE_EATERS = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
"""Phi's markers swallow the white space after them."""


def family(name: str, **options):
    """A byte-level tokenizer with the template and the special tokens of a family."""
    template, bos, eos = FAMILIES[name]
    tokenizer = tiny_tokenizer()
    eaters = SPACE_EATERS if name == "phi3" else ()
    tokens = [AddedToken(m, special=True, normalized=False, rstrip=m in eaters) for m in MARKERS]
    tokenizer.add_tokens([t for t in tokens if t.content not in tokenizer.get_vocab()])
    tokenizer.bos_token, tokenizer.eos_token = bos, eos
    tokenizer.chat_template = template
    if bos is not None:  # plain text gets one, as with the released tokenizers
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    return tokenizer


def turn(role: str, content: str, weight: int = 1, **extra) -> dict:
    """A turn of a prepared row."""
    text = json.dumps(extra) if extra else None
    return {"role": role, "content": content, "train": bool(weight), "extra": text}


def talk(*contents: str, system: str | None = None) -> list[dict]:
    """User and assistant in turn."""
    roles = ("user", "assistant") * len(contents)
    turns = [turn(role, content) for role, content in zip(roles, contents, strict=False)]
    return turns if system is None else [turn("system", system), *turns]


def row(messages: list[dict] | None = None, place: str = "a.jsonl:1", **columns) -> dict:
    """A prepared row."""
    names = ("messages", "tools", "text", "label")
    return {"id": place, **dict.fromkeys(names), "messages": messages, **columns}


def encoded(tokenizer, prepared: dict, train_on="completions", system_prompt=None, **options):
    """The examples of a prepared row of turns."""
    talks = [conversation(prepared, system_prompt, train_on)]
    [rendered] = render_conversations(tokenizer, talks, train_on, options)
    return list(TextEncoder(tokenizer).encode(rendered.examples))


def runs(tokenizer, example) -> list[tuple[bool, str]]:
    """Supervised and masked text, in order: [(is supervised, text)]."""
    found: list = []
    for token, label in zip(example.input_ids, example.labels, strict=True):
        assert label in (token, IGNORED)
        if not found or found[-1][0] != (label != IGNORED):
            found.append((label != IGNORED, []))
        found[-1][1].append(token)
    return [(learned, tokenizer.decode(ids)) for learned, ids in found]


def taught(tokenizer, example) -> list[str]:
    """The supervised runs."""
    return [text for learned, text in runs(tokenizer, example) if learned]


def marked(tokenizer, examples) -> list[str]:
    """The text of examples; what is supervised stands in ⟦ ⟧."""
    return [
        "".join(f"⟦{text}⟧" if learned else text for learned, text in runs(tokenizer, example))
        for example in examples
    ]
