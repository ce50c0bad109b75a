"""Answers of gpt-oss in OpenAI's harmony format: messages with headers.

``<|channel|>analysis<|message|>`` begins reasoning; ``final`` or ``commentary`` instead begins text
for the user; a recipient ``to=functions.name`` begins a call, whose arguments are JSON. ``<|end|>``
ends a message and ``<|start|>assistant`` begins the next one. ``<|call|>`` and ``<|return|>`` end
the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from harness.host.dialect.base import Dialect, Reasoning
from harness.host.dialect.calls import (
    Call,
    CallSyntax,
    Function,
    Functions,
    Marks,
    choice,
    json_rule,
    literal,
    strict_loads,
)
from reference.model.chat_template import HARMONY_HEADER

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
HARMONY_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
NAMESPACE = "functions."
RECIPIENT = re.compile(r"to=([^\s<]+)")
NAMED_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def speaks_harmony(template: str) -> bool:
    """Whether a chat template writes this format."""
    return all(mark in template for mark in HARMONY_HEADER)


def called(header: str, functions: Functions) -> str | None:
    """The function that a header addresses; None if it addresses none of ``functions``."""
    found = RECIPIENT.search(header)
    name = None if found is None else found[1].removeprefix(NAMESPACE)
    return name if name in functions else None


def arguments_of(body: str) -> str | None:
    """The JSON text of a call's arguments; None if it is not an object."""
    text = body.strip() or "{}"
    try:
        value = strict_loads(text)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(value, dict) else None


@dataclass(frozen=True)
class HarmonyCalls(CallSyntax):
    """A call is a message addressed to a function."""

    begin: str = f"{CHANNEL}commentary to={NAMESPACE}"
    end: str | None = CALL

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        header, _, text = body.partition(MESSAGE)
        name, arguments = called(f"to={NAMESPACE}{header}", functions), arguments_of(text)
        return None if name is None or arguments is None else [Call(name, arguments)]

    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        """The recipient may come before or after the channel. The token that ends the answer
        follows the arguments."""
        channel, constrain, message = map(marks.written, (CHANNEL, CONSTRAIN, MESSAGE))
        rules = []
        for n, one in enumerate(functions):
            to = f"to={NAMESPACE}{one.name}"
            first = f"{literal(f' {to}')} {channel} {literal('commentary json')}"
            behind = f"{channel} {literal(f'commentary {to} ')} {constrain} {literal('json')}"
            rules.append(f"call_{n}: ({first} | {behind}) {message} {json_rule(one.parameters)}")
        return [f"calls: {choice([f'call_{n}' for n in range(len(functions))])}", *rules]


HARMONY_CALLS = HarmonyCalls()
ANALYSIS = Reasoning(f"{CHANNEL}analysis{MESSAGE}", END)


@dataclass(frozen=True, slots=True)
class HarmonyDialect(Dialect):
    """Reasoning, preambles, calls and the final text are messages."""

    calls: CallSyntax | None = HARMONY_CALLS
    reasoning: Reasoning | None = ANALYSIS

    framed: ClassVar[bool] = True

    @property
    def before_answer(self) -> str:
        return f"{self._opening('final')} "

    def forced_calls(self, functions: Sequence[Function], many: bool) -> str:
        return "\n".join(["body: calls", *HARMONY_CALLS.rules(functions, many, self.marks)])

    def calls_in_text(self, functions: Sequence[Function], many: bool) -> str:
        preamble = f"preamble: {self._opening('commentary')} said {self._next}"
        return "\n".join(
            [
                "body: preamble* (final | calls)",
                preamble,
                self.marks.text_up_to(END, "said"),
                f"final: {self.before_answer}/(.|\\n)*/",
                *HARMONY_CALLS.rules(functions, many, self.marks),
            ]
        )

    def after_reasoning(self, body: str, opened: bool) -> str:
        first = f"reasoning {self._next} " if opened else ""
        return "\n".join(
            [
                f"start: {first}thinking* body",
                f"thinking: {self._opening('analysis')} reasoning {self._next}",
                self.marks.text_up_to(END, "reasoning"),
                body,
            ]
        )

    @property
    def _next(self) -> str:
        """The beginning of another message, in Lark."""
        return f"{self.marks.written(START)} {literal('assistant')}"

    def _opening(self, channel: str) -> str:
        """The header of a message to the user, in Lark."""
        return f"{self.marks.written(CHANNEL)} {literal(channel)} {self.marks.written(MESSAGE)}"
