"""Finds the dialect of a model, its syntax of reasoning and tool calls, from the chat template."""

from __future__ import annotations

from collections.abc import Iterable

from harness.host.dialect.base import Dialect, Reasoning
from harness.host.dialect.calls import CallSyntax
from harness.host.dialect.gemma_calls import FUNCTION_GEMMA, GemmaCalls
from harness.host.dialect.harmony import HARMONY_MARKS, HarmonyDialect, speaks_harmony
from harness.host.dialect.json_calls import (
    COMMAND_CALLS,
    BareJsonCall,
    JsonListCalls,
    JsonObjectCalls,
    KeyedJsonCalls,
    MistralCalls,
)
from harness.host.dialect.python_calls import PythonCalls
from harness.host.dialect.section_calls import DEEPSEEK_CALLS, FENCED_CALLS, KIMI_CALLS
from harness.host.dialect.tagged_calls import ON_LINES, ON_ONE_LINE, GlmCalls, InvokeCalls
from harness.host.dialect.xml_calls import SEED_CALLS, XmlCalls
from reference.model.tokenizer import Tokenizer, TokenKind

__all__ = ["Dialect", "Reasoning", "dialect_of"]

REASONING = (
    Reasoning("<think>", "</think>"),
    Reasoning("<|channel>thought", "<channel|>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    Reasoning("<seed:think>", "</seed:think>"),
)


LLAMA_MARKS = ("<|python_tag|>", "<|eot_id|>", "<|header_start|>")
"""Parts of the templates of Llama 3 and 4."""


def dialect_of(template: str, tokenizer: Tokenizer, tool_template: str | None = None) -> Dialect:
    """The dialect of a chat template. ``tool_template`` is the template for conversations with
    tools, if that is another one."""
    tool_template = template if tool_template is None else tool_template
    both = template + tool_template
    if speaks_harmony(both):
        return HarmonyDialect(markers=_markers(HARMONY_MARKS, tokenizer))
    reasoning = next((one for one in REASONING if one.open in both and one.close in both), None)
    calls = _syntax_of(tool_template, tokenizer)
    texts = [] if reasoning is None else [reasoning.open, reasoning.close]
    if calls is not None:
        texts += [calls.begin, *([] if calls.end is None else [calls.end]), *calls.inner_marks]
    return Dialect(calls, reasoning, _markers(texts, tokenizer))


def _syntax_of(template: str, tokenizer: Tokenizer) -> CallSyntax | None:
    if "tools" not in template:
        return None
    if KIMI_CALLS.begin in template:
        return KIMI_CALLS
    if DEEPSEEK_CALLS.begin in template:
        return FENCED_CALLS if "```json" in template else DEEPSEEK_CALLS
    # Most LFM 2 templates contain no call, but the vocabulary has its tokens.
    if "List of tools: " in template and _control_token(PythonCalls.begin, tokenizer) is not None:
        return PythonCalls()
    if PythonCalls.begin in template:
        return PythonCalls()
    if "<|tool_call>call:" in template:
        return GemmaCalls()
    if FUNCTION_GEMMA.begin in template:
        return FUNCTION_GEMMA
    if "<function=" in template and "<parameter=" in template:
        return SEED_CALLS if SEED_CALLS.begin in template else XmlCalls()
    if "[TOOL_CALLS]" in template:
        return MistralCalls(named="[ARGS]" in template)
    if KeyedJsonCalls.begin in template:
        return KeyedJsonCalls()
    if COMMAND_CALLS.begin in template:
        return COMMAND_CALLS
    if "<TOOLCALL>[" in template:
        return JsonListCalls("<TOOLCALL>", "</TOOLCALL>")
    if InvokeCalls.begin in template:
        return InvokeCalls()
    if "<arg_key>" in template:
        return GlmCalls(form=ON_ONE_LINE if "</arg_key><arg_value>" in template else ON_LINES)
    if "<tool_call>" in template and "arguments" in template:
        return JsonObjectCalls("<tool_call>", "</tool_call>", before="\n", after="\n")
    if any(mark in template for mark in LLAMA_MARKS):
        return BareJsonCall() if '"parameters": ' in template else None
    return None


def _markers(marks: Iterable[str], tokenizer: Tokenizer) -> dict[str, int]:
    """The control tokens among marks, by their text."""
    tokens = ((mark, _control_token(mark, tokenizer)) for mark in marks)
    return {mark: token for mark, token in tokens if token is not None}


def _control_token(text: str, tokenizer: Tokenizer) -> int | None:
    ids = tokenizer.encode(text, parse_special=True, add_bos=False)
    return ids[0] if len(ids) == 1 and tokenizer.kind(ids[0]) is TokenKind.CONTROL else None
