"""Calls as DeepSeek V3 and Kimi K2 write them: a section of calls between marks, each with a name
and JSON between marks of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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
from harness.host.dialect.json_calls import DECODER

FENCE = "\n```json\n"
NUMBER = re.compile(r":[0-9]{1,9}")
NAME = re.compile(r"[a-zA-Z0-9_.-]+")


@dataclass(frozen=True)
class SectionCalls(CallSyntax):
    """``opens``, ``before`` the name, the name, ``after`` it the arguments, ``behind`` them,
    ``closes``; ``between`` two calls. With ``numbered`` a name ends with a colon and the number of
    the call. Spaces around marks and names are read over."""

    begin: str
    end: str
    opens: str
    closes: str
    before: tuple[str, ...]
    after: str
    behind: str = ""
    between: str = ""
    numbered: bool = False

    @property
    def inner_marks(self) -> tuple[str, ...]:
        return (self.opens, self.closes, *self.before, self.after)

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        calls: list[Call] = []
        at = 0
        while body[at:].strip():
            found = self._call(body, at, functions)
            if found is None:
                return None
            call, at = found
            calls.append(call)
        return calls or None

    def _call(self, body: str, at: int, functions: Functions) -> tuple[Call, int] | None:
        """The call that begins at ``at``, and where it ends."""
        start = _after_parts(body, at, (self.opens, *self.before))
        found = None if start is None else NAME.match(body, start)
        if found is None or found[0] not in functions:
            return None
        numbered = NUMBER.match(body, found.end()) if self.numbered else None
        begin = _after_parts(body, (numbered or found).end(), (self.after,))
        if begin is None or not body.startswith("{", begin):
            return None
        try:
            _, end = DECODER.raw_decode(body, begin)
            strict_loads(body[begin:end])
        except (ValueError, RecursionError):
            return None
        behind = _after_parts(body, end, (self.behind, self.closes))
        return None if behind is None else (Call(found[0], body[begin:end]), behind)

    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        def written(*parts: str) -> str:
            return " ".join(
                marks.written(part) if part in self.inner_marks and part != FENCE else literal(part)
                for part in parts
                if part
            )

        number = ' ":" /[0-9]{1,3}/' if self.numbered else ""
        rules = [
            f"call_{n}: {written(self.opens, *self.before, one.name)}{number} "
            f"{written(self.after)} {json_rule(one.parameters)} {written(self.behind, self.closes)}"
            for n, one in enumerate(functions)
        ]
        names = choice([f"call_{n}" for n in range(len(functions))])
        more = f" ({' '.join(part for part in (written(self.between), names) if part)})*"
        return [f"calls: {names}{more if many else ''} {marks.written(self.end)}", *rules]


def _after_parts(body: str, at: int, parts: Sequence[str]) -> int | None:
    """Where ``body`` goes on behind ``parts``, with spaces around each; None without one."""
    for part in parts:
        found = re.compile(rf"\s*{re.escape(part.strip())}\s*").match(body, at)
        if found is None:
            return None
        at = found.end()
    return at


SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
DEEPSEEK_CALLS = SectionCalls(
    begin="<\uff5ctool\u2581calls\u2581begin\uff5c>",
    end="<\uff5ctool\u2581calls\u2581end\uff5c>",
    opens="<\uff5ctool\u2581call\u2581begin\uff5c>",
    closes="<\uff5ctool\u2581call\u2581end\uff5c>",
    before=(),
    after=SEPARATOR,
)
"""The calls of DeepSeek V3.1."""
FENCED_CALLS = SectionCalls(
    DEEPSEEK_CALLS.begin,
    DEEPSEEK_CALLS.end,
    DEEPSEEK_CALLS.opens,
    DEEPSEEK_CALLS.closes,
    before=("function", SEPARATOR),
    after=FENCE,
    behind="\n```",
    between="\n",
)
"""The calls of DeepSeek V3 and R1, whose arguments are a fence of Markdown."""
KIMI_CALLS = SectionCalls(
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    opens="<|tool_call_begin|>",
    closes="<|tool_call_end|>",
    before=("functions.",),
    after="<|tool_call_argument_begin|>",
    numbered=True,
)
"""The calls of Kimi K2."""
