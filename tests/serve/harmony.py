"""gpt-oss's chat template in short, and a tiny model of its architecture that speaks its format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness.host.dialect.harmony import HARMONY_MARKS
from harness.synth.sizes import sized_spec
from harness.synth.vocabulary import TOKENS_KEY, TYPES_KEY, own_tokenizer
from harness.synth.write import write_synthetic
from reference.model.gguf.writer import write_gguf
from reference.model.tokenizer import TokenKind

REFUSAL = "Cannot pass both content and thinking in an assistant message with tool calls!"
TEMPLATE = (
    """\
{%- if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") -}}
{{- "\\n\\nReasoning: " + reasoning_effort + "<|end|>" -}}
{%- set turns = messages -%}
{%- if messages[0].role in ("developer", "system") -%}
    {%- set instructions, turns = messages[0].content, messages[1:] -%}
{%- endif -%}
{%- if instructions or tools -%}
    {{- "<|start|>developer<|message|># Instructions\\n\\n" + (instructions or "") -}}
    {%- for tool in tools or [] -%}
        {{- "\\n\\ntype " + tool.function.name + " = (_: " -}}
        {{- tool.function.parameters | tojson + ") => any;" -}}
    {%- endfor -%}
    {{- "<|end|>" -}}
{%- endif -%}
{%- set called = namespace(name=none) -%}
{%- for turn in turns -%}
    {%- if turn.role == "assistant" and turn.tool_calls -%}
        {%- if turn.content and turn.thinking -%}{{ raise_exception(\""""
    + REFUSAL
    + """\") }}{%- endif -%}
        {%- set thought = turn.content or turn.thinking -%}
        {%- if thought -%}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + thought + "<|end|>" -}}
        {%- endif -%}
        {%- set call = turn.tool_calls[0].function -%}
        {%- set called.name = call.name -%}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json" -}}
        {{- "<|message|>" + call.arguments | tojson + "<|call|>" -}}
    {%- elif turn.role == "assistant" -%}
        {{- "<|start|>assistant<|channel|>final<|message|>" + turn.content -}}
        {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" -}}
    {%- elif turn.role == "tool" -%}
        {{- "<|start|>functions." + called.name + " to=assistant<|channel|>commentary" -}}
        {{- "<|message|>" + turn.content | tojson + "<|end|>" -}}
    {%- else -%}
        {{- "<|start|>user<|message|>" + turn.content + "<|end|>" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|start|>assistant" }}{%- endif -%}"""
)
"""By the rules of OpenAI's own: thoughts of calls are ``thinking``, and one call a message."""


def harmony_model(folder: Path) -> Path:
    """A two-layer model with a byte-level vocabulary, and the marks of the format as tokens."""
    spec = sized_spec("tiny", architecture="gpt-oss", quant="mxfp4_moe", context=2048)
    keys = own_tokenizer(spec)
    tokens, kinds = list(keys[TOKENS_KEY]), np.array(keys[TYPES_KEY])
    unused = [n for n, kind in enumerate(kinds) if kind == TokenKind.UNUSED]
    for token, mark in zip(unused, HARMONY_MARKS, strict=False):
        tokens[token], kinds[token] = mark.encode(), TokenKind.CONTROL
    keys |= {
        TOKENS_KEY: tokens,
        TYPES_KEY: kinds,
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.eos_token_id": tokens.index(b"<|return|>"),
    }
    vocabulary, path = folder / "vocabulary.gguf", folder / "gpt-oss.gguf"
    write_gguf(vocabulary, keys, {})
    write_synthetic(path, spec, tokenizer_from=vocabulary)
    return path
