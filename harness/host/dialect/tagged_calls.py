"""Calls of GLM-4.5 and MiniMax M2: a name, and parameters between tags. A value is plain text if
the parameter may be a string, else JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from harness.host.dialect.calls import (
    Call,
    CallSyntax,
    Function,
    Functions,
    Marks,
    choice,
    object_text,
)
from harness.host.dialect.xml_calls import TagForm, call_rules, value_of

HEAD = re.compile(r"\s*([^\s<]+)")
INVOKE = re.compile(r'\s*<invoke name="([^"\n]+)">')
INVOKED = re.compile(r"\s*</invoke>")


@dataclass(frozen=True)
class ValueTags:
    """The tags around a value. ``before`` matches the text before it, with the parameter's name.
    ``opens`` matches once in each opening tag, also of other syntaxes with the same ``close``."""

    before: re.Pattern[str]
    opens: str
    close: str

    def end(self, body: str, at: int) -> int:
        """The end of the value that begins at ``at``: its matching closing tag, so that a value may
        contain a whole call, else the first closing tag; -1 without one."""
        depth = 1
        for found in re.finditer(f"{self.opens}|{self.close}", body[at:]):
            depth += -1 if found[0] == self.close else 1
            if not depth:
                return at + found.start()
        return body.find(self.close, at)

    def inside(self, body: str, exact: bool) -> bool:
        """Whether ``body`` ends within a value. With ``exact`` values contain no closing tag."""
        opened = [found.start() for found in re.finditer(self.opens, body)]
        if exact:
            return bool(opened) and opened[-1] > body.rfind(self.close)
        return len(opened) > body.count(self.close)


ARGUMENT = ValueTags(
    re.compile(r"\s*<arg_key>([^<\n]+)</arg_key>\s*<arg_value>"), "<arg_value>", "</arg_value>"
)
PARAMETER = ValueTags(
    re.compile(r'\s*<parameter name="([^<\n]+?)">'), "<parameter(?: name)?=", "</parameter>"
)
ON_LINES = TagForm("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "", ARGUMENT.close, "\n", "")
ON_ONE_LINE = TagForm("{}", "<arg_key>{}</arg_key><arg_value>", "", ARGUMENT.close, "", "")


@dataclass(frozen=True)
class GlmCalls(CallSyntax):
    """``name<arg_key>key</arg_key><arg_value>value</arg_value>``; GLM-4.5 and 4.6 write newlines
    between the tags."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    form: TagForm = ON_LINES

    @property
    def begins_each_call(self) -> bool:
        return True

    @property
    def separator(self) -> str:
        return self.form.after

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        head = HEAD.match(body)
        function = functions.get(head[1]) if head else None
        if head is None or function is None:
            return None
        call, end = _call(body, head.end(), ARGUMENT, function)
        return None if call is None or body[end:].strip() else [call]

    def inside_value(self, body: str, functions: Functions, exact: bool = False) -> bool:
        return ARGUMENT.inside(body, exact)

    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        names, rules = _rules(functions, self.form)
        return [f"calls: {names} {marks.written(self.end)}", *rules]


@dataclass(frozen=True)
class InvokeCalls(CallSyntax):
    """``<invoke name="name"><parameter name="key">value</parameter></invoke>``; all calls of an
    answer are between one pair of marks."""

    begin: str = "<minimax:tool_call>"
    end: str = "</minimax:tool_call>"

    form: ClassVar[TagForm] = TagForm(
        '<invoke name="{}">\n', '<parameter name="{}">', "", PARAMETER.close, "\n", "</invoke>"
    )

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        calls: list[Call] = []
        at = 0
        while (head := INVOKE.match(body, at)) is not None:
            function = functions.get(head[1])
            if function is None:
                return None
            call, end = _call(body, head.end(), PARAMETER, function)
            closed = INVOKED.match(body, end)
            if call is None or closed is None:
                return None
            calls.append(call)
            at = closed.end()
        return None if not calls or body[at:].strip() else calls

    def inside_value(self, body: str, functions: Functions, exact: bool = False) -> bool:
        return PARAMETER.inside(body, exact)

    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        names, rules = _rules(functions, self.form)
        more = f' ("\\n" {names})*' if many else ""
        return [f'calls: "\\n" {names}{more} "\\n" {marks.written(self.end)}', *rules]


def _call(body: str, at: int, tags: ValueTags, function: Function) -> tuple[Call | None, int]:
    """The call of ``function`` whose arguments begin at ``at``, and their end. None if an argument
    is repeated or a value does not end."""
    arguments: dict[str, Any] = {}
    while (found := tags.before.match(body, at)) is not None:
        end = tags.end(body, found.end())
        if end < 0 or found[1] in arguments:
            return None, at
        arguments[found[1]] = value_of(body[found.end() : end], function, found[1])
        at = end + len(tags.close)
    written = object_text(arguments)
    return None if written is None else Call(function.name, written), at


def _rules(functions: Sequence[Function], form: TagForm) -> tuple[str, list[str]]:
    """The Lark expression for one of the calls, and its rules."""
    names = [f"call_{n}" for n in range(len(functions))]
    rules = [call_rules(one, name, form) for name, one in zip(names, functions, strict=True)]
    return choice(names), [line for lines in rules for line in lines]
