"""Calls in Python, ``name(key='text', count=3)``: a list between tokens (LFM 2), lines between tags
(OLMo 3), a list that is the whole answer (Llama 4)."""

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
    json_rule,
    literal,
    object_text,
)
from harness.host.dialect.json_calls import BareJsonCall, JsonListCalls
from harness.host.dialect.schemas import OBJECT_KEYWORDS, keywords_of, members_of, only
from harness.host.dialect.value_reader import KEY, Malformed, ValueReader, sequence
from harness.host.structured.json_schema import enforceable
from harness.host.structured.schema_tree import SchemaRefused

QUOTES = "'\""
BEHIND_STRINGS = ",)]}:"
"""Characters that may follow a closing quote, which distinguish it from an apostrophe."""
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.S)
MEANT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
PLAIN = "\\/'\""
"""Characters that an escape leaves as they are."""
COMMA = '", "'
STRING_OR_BRACKET = re.compile(
    r"""(?P<quote>['"])(?:\\.|(?!(?P=quote)\s*(?:[,)\]}:]|\Z)).)*(?P<closed>(?P=quote))?|[\[\]]""",
    re.S,
)
"""A string as ``_string_end`` finds its end, or a square bracket."""
LIST_HEAD = re.compile(r"\[\s*(?P<name>[a-zA-Z0-9_.-]*)(?P<behind>[^a-zA-Z0-9_.-])?")
"""The beginning of a list of calls, with what stands behind the first name."""


@dataclass(frozen=True)
class PythonCalls(CallSyntax):
    """Calls with named arguments; strings have either quote. ``opens`` and ``closes`` stand around
    them, ``between`` separates them. A list of JSON objects, which a prompt may ask for instead, is
    read too."""

    begin: str = "<|tool_call_start|>"
    end: str = "<|tool_call_end|>"
    opens: str = "["
    closes: str = "]"
    between: str = ", "

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        try:
            return _PythonReader(body, 0).calls(functions)
        except Malformed:
            return JsonListCalls(self.begin, self.end).parse(body, functions)

    def inside_value(self, body: str, functions: Functions, exact: bool = False) -> bool:
        return _open_brackets(body) is None

    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        rules: list[str] = []

        def add(body: str) -> str:
            rules.append(f"rule_{len(rules)}: {body}")
            return f"rule_{len(rules) - 1}"

        one = choice([_call_rule(function, add) for function in functions])
        more = f" ({literal(self.between)} {one})*" if many else ""
        around = [literal(one) if one else "" for one in (self.opens, self.closes)]
        whole = [around[0], f"{one}{more}", around[1], marks.written(self.end)]
        return [f"calls: {' '.join(filter(None, whole))}", *rules]


OLMO_CALLS = PythonCalls("<function_calls>", "</function_calls>", "", "", between="\n")
"""The calls of OLMo 3."""


@dataclass(frozen=True)
class PythonAnswer(PythonCalls):
    """An answer that is a list of calls, as some templates of Llama 4 ask for it."""

    begin: str = "["
    end: str = "]"
    opens: str = ""
    closes: str = ""

    only_first = True

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        return super().parse(f"[{body}]", functions)

    def is_open(self, body: str) -> bool:
        return _within_list(body)


@dataclass(frozen=True)
class LlamaCalls(BareJsonCall):
    """The calls of Llama 3 and 4: JSON objects. A list of calls in Python, which these models write
    if a system text asks for it, is read too."""

    @property
    def bare_marks(self) -> tuple[str, str] | None:
        return "[", "]"

    def cannot_become_call(self, body: str, functions: Functions) -> bool:
        head = LIST_HEAD.match(body)
        if head is None:
            return True
        if head["behind"] is None:
            return not any(name.startswith(head["name"]) for name in functions)
        return head["name"] not in functions or head["behind"] not in "( "

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        if not body.startswith("["):
            return super().parse(body, functions)
        try:
            return _PythonReader(body, 0).calls(functions)
        except Malformed:
            return None

    def is_open(self, body: str) -> bool:
        return body.startswith("[") and _within_list(body)

    def inside_value(self, body: str, functions: Functions, exact: bool = False) -> bool:
        return not body.startswith("[") and super().inside_value(body, functions, exact)


@dataclass(slots=True)
class _PythonReader(ValueReader):
    """Reads calls with values in Python's or JSON's notation."""

    def calls(self, functions: Functions) -> list[Call]:
        """All calls of the text, at least one. Raises Malformed."""
        self.skip()
        listed = self.takes("[")
        calls: list[Call] = []
        while not (self.closes("]", bool(calls)) if listed else calls and self._ends()):
            calls.append(self._call(functions))
        self.skip()
        if not calls or self.at < len(self.text):
            raise Malformed
        return calls

    def _ends(self) -> bool:
        """Whether no further call follows; a newline or a comma stands before one. Raises
        Malformed."""
        start = self.at
        self.skip()
        if self.at == len(self.text):
            return True
        if not self.takes(",") and "\n" not in self.text[start : self.at]:
            raise Malformed
        self.skip()
        return False

    def _call(self, functions: Functions) -> Call:
        name = self.word(KEY)
        if name not in functions or not self.takes("("):
            raise Malformed
        arguments: dict[str, Any] = {}
        while not self.closes(")", bool(arguments)):
            key = self.word(KEY)
            self.skip()
            if key in arguments or not self.takes("="):
                raise Malformed
            arguments[key] = self.value()
        text = object_text(arguments)
        if text is None:
            raise Malformed
        return Call(name, text)

    def string(self) -> str | None:
        if self.at >= len(self.text) or self.text[self.at] not in QUOTES:
            return None
        start, end = self.at + 1, _string_end(self.text, self.at)
        if end < 0:
            raise Malformed
        self.at = end + 1
        text = ESCAPE.sub(_unescaped, self.text[start:end])
        # Two escapes may be the surrogates of one character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def key(self) -> str:
        self.skip()
        text = self.string()
        if text is None:
            raise Malformed
        return text


def _within_list(text: str) -> bool:
    """Whether a text ends within a string or a list."""
    depth = _open_brackets(text)
    return depth is None or depth > 0


def _open_brackets(text: str) -> int | None:
    """How many square brackets are open at the end of a text; None within a string."""
    depth = 0
    for found in STRING_OR_BRACKET.finditer(text):
        if found["quote"] is None:
            depth += 1 if found[0] == "[" else -1
        elif found["closed"] is None:
            return None
    return depth


def _string_end(text: str, start: int) -> int:
    """The index of the quote that ends the string beginning at ``start``; -1 if there is none."""
    quote, at = text[start], start + 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == quote and _ends_value(text, at + 1):
            return at
        at += 1
    return -1


def _ends_value(text: str, at: int) -> bool:
    while at < len(text) and text[at].isspace():
        at += 1
    return at == len(text) or text[at] in BEHIND_STRINGS


def _unescaped(found: re.Match[str]) -> str:
    escaped = found[1]
    if len(escaped) > 1:
        return chr(int(escaped[1:], 16))
    return escaped if escaped in PLAIN else MEANT.get(escaped, found[0])


def _call_rule(function: Function, add: Any) -> str:
    """The rule of a call, whose values are JSON. Raises SchemaRefused."""
    schema = enforceable(function.parameters)
    only(keywords_of(schema), OBJECT_KEYWORDS, "")
    if schema.get("type", "object") != "object":
        raise SchemaRefused("", "type", "of parameters must be object")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    members = []
    for name, member, needed in members_of(schema, ""):
        if KEY.fullmatch(name) is None:
            raise SchemaRefused("/properties", repr(name), "cannot be a name in this model's calls")
        value = {**definitions, **member} if isinstance(member, dict) else member
        members.append((add(f"{literal(f'{name}=')} {json_rule(value)}"), needed))
    listed = sequence(members, COMMA, add)
    return str(add(f"{literal(f'{function.name}(')} {listed} {literal(')')}"))
