"""Calls as GLM-4.5 and later write them: the name, then tags around keys and around values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
ARGUMENT = re.compile(r"\s*<arg_key>([^<\n]+)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S)
CLOSE = "</arg_value>"
ON_LINES = TagForm("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "", CLOSE, "\n", "")
ON_ONE_LINE = TagForm("{}", "<arg_key>{}</arg_key><arg_value>", "", CLOSE, "", "")


@dataclass(frozen=True)
class GlmCalls(CallSyntax):
    """``name<arg_key>key</arg_key><arg_value>value</arg_value>``, in GLM-4.5 and 4.6 with newlines
    between. A value is the text itself where the parameter may be a string, JSON where it may
    not."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    form: TagForm = ON_LINES

    @property
    def repeats(self) -> bool:
        return True

    @property
    def separator(self) -> str:
        return self.form.after

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        head = HEAD.match(body)
        function = functions.get(head[1]) if head else None
        if head is None or function is None:
            return None
        arguments: dict[str, Any] = {}
        at = head.end()
        while (found := ARGUMENT.match(body, at)) is not None:
            if found[1] in arguments:
                return None
            arguments[found[1]] = value_of(found[2], function, found[1])
            at = found.end()
        written = None if body[at:].strip() else object_text(arguments)
        return None if written is None else [Call(function.name, written)]

    def inside_value(self, body: str, functions: Functions, exact: bool = False) -> bool:
        return body.rfind("<arg_value>") > body.rfind(CLOSE)

    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        rules = []
        for n, function in enumerate(functions):
            rules.extend(call_rules(function, f"call_{n}", self.form))
        names = choice([f"call_{n}" for n in range(len(functions))])
        return [f"calls: {names} {marks.written(self.end)}", *rules]
