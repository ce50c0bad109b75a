"""How a model writes what is more than text: its thoughts, and the tools it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from harness.host.dialect.calls import CallSyntax, Function, Marks, in_regex, literal


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


@dataclass(frozen=True, slots=True)
class Dialect:
    """``markers`` are the control tokens among the marks, by their text: the others are written
    as text."""

    calls: CallSyntax | None = None
    reasoning: Reasoning | None = None
    markers: Mapping[str, int] = field(default_factory=dict)

    framed: ClassVar[bool] = False
    """Whether every answer is a row of messages with headers, so that its tokens alone are no
    text for a user."""

    @property
    def before_answer(self) -> str:
        """What a grammar has in front of an answer, in Lark."""
        return ""

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
