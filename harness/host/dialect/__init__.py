"""Finds the dialect of a model, its syntax of reasoning and tool calls, from the chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.host.dialect.base import Dialect, Reasoning
from harness.host.dialect.calls import CallSyntax
from harness.host.dialect.gemma_calls import FUNCTION_GEMMA, GemmaCalls
from harness.host.dialect.harmony import HARMONY_MARKS, HarmonyDialect, speaks_harmony
from harness.host.dialect.json_calls import (
    COMMAND_CALLS,
    JsonListCalls,
    JsonObjectCalls,
    KeyedJsonCalls,
    MistralCalls,
)
from harness.host.dialect.python_calls import OLMO_CALLS, LlamaCalls, PythonAnswer, PythonCalls
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


ANSWERS = (("<answer>", "</answer>"), ("<response>", "</response>"))
"""Marks around answers of models that think: Hunyuan, ERNIE 4.5."""
LIST_IN_TAGS = re.compile(r"<(tool_calls?)>(?:\s|\\n)*\[")
"""A list of calls in tags, in the text of a template: Falcon H1, Hunyuan, Apriel."""
GRANITE_MARKS = ("<|tool_call|>", "<|/tool_call|>")
"""Marks of a list of calls in Granite 3 (the first one only) and Phi-4-mini."""
LLAMA_MARKS = ("<|python_tag|>", "<|eot_id|>", "<|header_start|>")
"""Parts of the templates of Llama 3 and 4."""


def dialect_of(template: str, tokenizer: Tokenizer, tool_template: str | None = None) -> Dialect:
    """The dialect of a chat template. ``tool_template`` is the template for conversations with
    tools, if that is another one."""
    tool_template = template if tool_template is None else tool_template
    both = template + tool_template
    if speaks_harmony(both):
        return HarmonyDialect(markers=_markers(HARMONY_MARKS, tokenizer))
    reasoning = next((one for one in REASONING if _has(both, (one.open, one.close))), None)
    calls = _syntax_of(tool_template, tokenizer)
    answer = None if reasoning is None else next((one for one in ANSWERS if _has(both, one)), None)
    texts = [] if reasoning is None else [reasoning.open, reasoning.close, *(answer or ())]
    if calls is not None:
        texts += [calls.begin, *([] if calls.end is None else [calls.end]), *calls.inner_marks]
    return Dialect(calls, reasoning, _markers(texts, tokenizer), answer)


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
    if OLMO_CALLS.begin in template:
        return OLMO_CALLS
    if GRANITE_MARKS[0] in template:
        return JsonListCalls(
            GRANITE_MARKS[0], GRANITE_MARKS[1] if _has(template, GRANITE_MARKS) else None
        )
    if (found := LIST_IN_TAGS.search(template)) is not None:
        blank = "\n" if found[0][-2] != ">" else ""
        return JsonListCalls(f"<{found[1]}>", f"</{found[1]}>", blank=blank)
    if "<TOOLCALL>[" in template:
        return JsonListCalls("<TOOLCALL>", "</TOOLCALL>")
    if InvokeCalls.begin in template:
        return InvokeCalls()
    if "<arg_key>" in template:
        return GlmCalls(form=ON_ONE_LINE if "</arg_key><arg_value>" in template else ON_LINES)
    if "<tool_call>" in template and "arguments" in template:
        blank = "" if "<tool_call>{" in template else "\n"
        return JsonObjectCalls("<tool_call>", "</tool_call>", before=blank, after=blank)
    if any(mark in template for mark in LLAMA_MARKS):
        if "[func_name1(" in template:
            return PythonAnswer()
        return LlamaCalls() if '"parameters": ' in template else None
    return None


def _has(template: str, marks: Iterable[str]) -> bool:
    return all(mark in template for mark in marks)


def _markers(marks: Iterable[str], tokenizer: Tokenizer) -> dict[str, int]:
    """The control tokens among marks, by their text."""
    tokens = ((mark, _control_token(mark, tokenizer)) for mark in marks)
    return {mark: token for mark, token in tokens if token is not None}


def _control_token(text: str, tokenizer: Tokenizer) -> int | None:
    ids = tokenizer.encode(text, parse_special=True, add_bos=False)
    return ids[0] if len(ids) == 1 and tokenizer.kind(ids[0]) is TokenKind.CONTROL else None
