"""The syntax in which a model writes reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from harness.host.dialect.calls import CallSyntax, Function, Marks, in_regex, literal


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks before and after a model's reasoning."""

    open: str
    close: str

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning, which the answer continues."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Whether a prompt ends with closed reasoning, so that the answer has none."""
        return prompt.rstrip().endswith(self.close)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The syntax of one model for reasoning and tool calls. ``markers`` maps marks that are control
    tokens to their ids; all other marks are written as text. ``answer``: marks that the model may
    write around its answer, which are not shown."""

    calls: CallSyntax | None = None
    reasoning: Reasoning | None = None
    markers: Mapping[str, int] = field(default_factory=dict)
    answer: tuple[str, str] | None = None

    framed: ClassVar[bool] = False
    """Whether every answer is a list of messages with headers, which are not shown to users."""

    @property
    def before_answer(self) -> str:
        """The part of a Lark grammar before an answer."""
        return ""

    @property
    def marks(self) -> Marks:
        """The model's marks in Lark grammars."""
        return Marks(self.markers)

    @property
    def shown(self) -> frozenset[int]:
        """Control tokens whose text the parser of answers needs."""
        return frozenset(self.markers.values())

    def forced_calls(self, functions: Sequence[Function], many: bool) -> str:
        """Lark rules, beginning with ``body``: only a call of one of ``functions``, or with
        ``many`` one or more calls. Raises SchemaRefused."""
        assert self.calls is not None
        syntax = self.calls
        one = f"{self.marks.written(syntax.begin)} calls"
        more = ""
        if many and syntax.begins_each_call:
            separator = f"{literal(syntax.separator)} " if syntax.separator else ""
            more = f" ({separator}{one})*"
        return "\n".join([f"body: {one}{more}", *syntax.rules(functions, many, self.marks)])

    def calls_in_text(self, functions: Sequence[Function], many: bool) -> str:
        """Lark rules, beginning with ``body``: any text with well-formed calls of ``functions``.
        Raises SchemaRefused."""
        assert self.calls is not None
        syntax = self.calls
        rules = syntax.rules(functions, many, self.marks)
        if syntax.only_first:
            first = f"/[^{in_regex(syntax.begin)}](.|\\n)*/"
            return "\n".join([f"body: {first} | {self.marks.written(syntax.begin)} calls", *rules])
        often = "*" if many and syntax.begins_each_call else "?"
        before = self.marks.text_up_to(syntax.begin, "before")
        return "\n".join([f"body: (before calls){often} rest", before, "rest: /(.|\\n)*/", *rules])

    def after_reasoning(self, body: str, opened: bool) -> str:
        """A complete grammar: first reasoning, which the prompt has already begun if ``opened``,
        then ``body``, the rules of the answer."""
        assert self.reasoning is not None
        reasoning = self.marks.text_up_to(self.reasoning.close, "reasoning")
        start = (
            "reasoning" if opened else f"({self.marks.written(self.reasoning.open)} reasoning GAP)?"
        )
        start = f"{start} GAP" if opened else start
        return "\n".join([f"start: {start} body", reasoning, r"GAP: /[ \n]{0,4}/", body])
