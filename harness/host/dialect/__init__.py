"""How a model writes what is more than text: its thoughts, and the tools it calls.

Read off its chat template, which shows the model what earlier turns looked like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.host.dialect.calls import CallSyntax, Function, Marks, in_regex, literal
from harness.host.dialect.gemma_calls import FUNCTION_GEMMA, GemmaCalls
from harness.host.dialect.json_calls import (
    BareJsonCall,
    JsonListCalls,
    JsonObjectCalls,
    MistralCalls,
)
from harness.host.dialect.python_calls import PythonCalls
from harness.host.dialect.xml_calls import XmlCalls
from reference.model.tokenizer import Tokenizer, TokenKind

__all__ = ["Dialect", "Reasoning", "dialect_of"]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What stands around thoughts."""

    open: str
    close: str

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends within thoughts that the model is to go on with."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Whether a prompt ends behind thoughts: the model is not to have any."""
        return prompt.rstrip().endswith(self.close)


REASONING = (
    Reasoning("<think>", "</think>"),
    Reasoning("<|channel>thought", "<channel|>"),
    Reasoning("[THINK]", "[/THINK]"),
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """``markers`` are the control tokens among the marks, by their text: the others are written
    as text."""

    calls: CallSyntax | None = None
    reasoning: Reasoning | None = None
    markers: Mapping[str, int] = field(default_factory=dict)

    @property
    def marks(self) -> Marks:
        """Its marks in grammars."""
        return Marks(self.markers)

    @property
    def shown(self) -> frozenset[int]:
        """Control tokens whose text says something."""
        return frozenset(self.markers.values())

    def forced_calls(self, functions: Sequence[Function], many: bool) -> str:
        """Lark rules, the first one ``body``: a call of one of ``functions``, or with ``many``
        one or more, and nothing else. Raises SchemaRefused."""
        assert self.calls is not None
        syntax = self.calls
        one = f"{self.marks.written(syntax.begin)} calls"
        more = ""
        if many and syntax.repeats:
            separator = f"{literal(syntax.separator)} " if syntax.separator else ""
            more = f" ({separator}{one})*"
        return "\n".join([f"body: {one}{more}", *syntax.rules(functions, many, self.marks)])

    def calls_in_text(self, functions: Sequence[Function], many: bool) -> str:
        """Lark rules, the first one ``body``: any text, in which each call is one of
        ``functions``. Raises SchemaRefused."""
        assert self.calls is not None
        syntax = self.calls
        rules = syntax.rules(functions, many, self.marks)
        if syntax.only_first:
            first = f"/[^{in_regex(syntax.begin)}](.|\\n)*/"
            return "\n".join([f"body: {first} | {self.marks.written(syntax.begin)} calls", *rules])
        often = "*" if many and syntax.repeats else "?"
        before = self.marks.text_up_to(syntax.begin, "before")
        return "\n".join([f"body: (before calls){often} rest", before, "rest: /(.|\\n)*/", *rules])

    def after_thoughts(self, body: str, opened: bool) -> str:
        """A whole grammar: thoughts, begun by the prompt if ``opened``, then ``body``, rules of
        which the first one is ``body``."""
        assert self.reasoning is not None
        thoughts = self.marks.text_up_to(self.reasoning.close, "thoughts")
        start = (
            "thoughts" if opened else f"({self.marks.written(self.reasoning.open)} thoughts GAP)?"
        )
        start = f"{start} GAP" if opened else start
        return "\n".join([f"start: {start} body", thoughts, r"GAP: /[ \n]{0,4}/", body])


def dialect_of(template: str, tokenizer: Tokenizer, tool_template: str | None = None) -> Dialect:
    """The dialect that a chat template speaks; ``tool_template`` is that of conversations with
    tools where it is another one."""
    tool_template = template if tool_template is None else tool_template
    both = template + tool_template
    reasoning = next((one for one in REASONING if one.open in both and one.close in both), None)
    calls = _syntax_of(tool_template, tokenizer)
    texts = [] if reasoning is None else [reasoning.open, reasoning.close]
    if calls is not None:
        texts += [calls.begin, *([] if calls.end is None else [calls.end]), *calls.inner]
    markers = {
        text: token for text in texts if (token := _control_token(text, tokenizer)) is not None
    }
    return Dialect(calls, reasoning, markers)


def _syntax_of(template: str, tokenizer: Tokenizer) -> CallSyntax | None:
    if "tools" not in template:
        return None
    # Most of its templates show no call: the vocabulary has tokens for them.
    if "List of tools: " in template and _control_token(PythonCalls.begin, tokenizer) is not None:
        return PythonCalls()
    if PythonCalls.begin in template:
        return PythonCalls()
    if "<|tool_call>call:" in template:
        return GemmaCalls()
    if FUNCTION_GEMMA.begin in template:
        return FUNCTION_GEMMA
    if "<function=" in template and "<parameter=" in template:
        return XmlCalls()
    if "[TOOL_CALLS]" in template:
        return MistralCalls(named="[ARGS]" in template)
    if "<TOOLCALL>[" in template:
        return JsonListCalls("<TOOLCALL>", "</TOOLCALL>")
    if "<tool_call>" in template and "arguments" in template:
        return JsonObjectCalls("<tool_call>", "</tool_call>", before="\n", after="\n")
    if "<|python_tag|>" in template or "<|eot_id|>" in template:
        return BareJsonCall() if '"parameters": ' in template else None
    return None


def _control_token(text: str, tokenizer: Tokenizer) -> int | None:
    ids = tokenizer.encode(text, parse_special=True, add_bos=False)
    return ids[0] if len(ids) == 1 and tokenizer.kind(ids[0]) is TokenKind.CONTROL else None
