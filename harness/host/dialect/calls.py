"""The base class of all syntaxes of tool calls."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

from harness.host.structured.closed_objects import with_closed_objects
from harness.host.structured.json_schema import compile_options, enforceable
from harness.host.structured.schema_tree import SchemaRefused

MAX_BOUNDARIES = 100
"""Most positions in a body that are tried as the boundary of two calls."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function the model may call; ``parameters`` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: ANY_OBJECT)


@dataclass(frozen=True, slots=True)
class Call:
    """A call: ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


Functions = Mapping[str, Function]
"""By name."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks around tool calls and reasoning, in Lark. ``tokens`` maps marks that are control
    tokens to their ids; all other marks are written as text."""

    tokens: Mapping[str, int] = field(default_factory=dict)

    def written(self, mark: str) -> str:
        """A mark in Lark."""
        token = self.tokens.get(mark)
        return literal(mark) if token is None else f"<[{token}]>"

    def text_up_to(self, mark: str, rule: str) -> str:
        """A rule for the text up to and including the first ``mark``."""
        if mark in self.tokens:
            return f"{rule}: /(.|\\n)*/ {self.written(mark)}"
        return f"{rule}[lazy]: /(.|\\n)*{in_regex(mark)}/"


@dataclass(frozen=True)
class CallSyntax(ABC):
    """The syntax of tool calls of a model family: ``begin``, a body that ``parse`` reads, then
    ``end``. Without ``end`` a call extends to the end of the text."""

    begin: str
    end: str | None

    only_first: ClassVar[bool] = False
    """Whether calls stand at the beginning of an answer or nowhere."""
    ends_answer: ClassVar[bool] = False
    """Whether nothing follows calls: a template writes their results into the same turn."""
    short_ids: ClassVar[bool] = False
    """Whether the family's templates require ids of nine characters."""

    @property
    def begins_each_call(self) -> bool:
        """Whether each call of several has its own ``begin``."""
        return False

    @property
    def separator(self) -> str:
        """The text between two calls that each have their own ``begin``."""
        return ""

    @property
    def inner_marks(self) -> tuple[str, ...]:
        """The marks within a call."""
        return ()

    @property
    def bare_marks(self) -> tuple[str, str] | None:
        """The first and last characters of a call without ``begin``; both belong to its body. None
        if such a call cannot be recognised."""
        return None

    @property
    def fence_marks(self) -> Mapping[str, str]:
        """Other marks that begin a call, each with its end mark. Both belong to the body. They are
        also valid with a grammar."""
        return {}

    def other_marks(self, tolerant: bool) -> dict[str, str]:
        """Marks other than ``begin`` that begin a call, each with its end mark; with ``tolerant``
        also ``bare_marks``."""
        return {
            **self.fence_marks,
            **dict([self.bare_marks] if self.bare_marks and tolerant else []),
        }

    @abstractmethod
    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        """The calls in a body; None if it is malformed or calls an unknown function."""

    def parse_exactly(self, body: str, functions: Functions) -> list[Call] | None:
        """As ``parse``, for a body written by a grammar: nothing is missing, and values may contain
        marks."""
        return self.parse(body, functions)

    def parse_without_marks(self, body: str, functions: Functions) -> list[Call] | None:
        """The calls in a body without marks between them; None for any other body."""
        calls: list[Call] = []
        start = 0
        for end, after in islice(self.call_boundaries(body), MAX_BOUNDARIES):
            found = self.parse(body[start:end], functions) if end >= start else None
            if found is not None:
                calls, start = calls + found, after
        rest = body[start:]
        last = self.parse(rest, functions) if rest.strip() else []
        return None if not calls or last is None else calls + last

    def call_boundaries(self, body: str) -> Iterator[tuple[int, int]]:
        """Positions in a body at which one call may end and the next one begin, in order."""
        for found in re.finditer(re.escape(self.begin), body):
            yield found.span()

    def repair(self, body: str, functions: Functions) -> tuple[list[Call], str] | None:
        """The calls in an unfinished body with missing marks, and the text after them."""
        return None

    def cannot_become_call(self, body: str, functions: Functions) -> bool:
        """Whether no continuation can make a ``bare_marks`` or fenced body a call."""
        return False

    def may_begin(self, text: str, functions: Functions) -> bool:
        """Whether a text that begins like a call may still become one."""
        others = tuple(self.other_marks(tolerant=True))
        return not text.startswith(others) or not self.cannot_become_call(text, functions)

    def is_open(self, body: str) -> bool:
        """Whether a body with an end mark certainly goes on, so that it is not parsed: what has
        many such marks would be parsed at each."""
        return False

    def inside_value(self, body: str, functions: Functions, exact: bool = False) -> bool:
        """Whether an ``end`` after ``body`` would be part of a value; by default of a JSON string.
        ``exact``: as in ``parse_exactly``."""
        return inside_string(body)

    def arguments_start(self, body: str) -> tuple[str, int] | None:
        """The function's name in an unfinished body, and the index of the JSON text of its
        arguments; None if it is not known yet, or never with this syntax."""
        return None

    @abstractmethod
    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        """Lark rules, beginning with ``calls``, for the text after ``begin``, including ``end``:
        one call, or with ``many`` several that share one ``begin``. Raises SchemaRefused for
        parameters that cannot be enforced."""


def literal(text: str) -> str:
    """A literal in Lark."""
    return json.dumps(text, ensure_ascii=False)


def in_regex(text: str) -> str:
    """A literal within a regular expression of Lark."""
    return re.sub(r"([^a-zA-Z0-9_<>\" ])", r"\\\1", text)


def json_rule(schema: Mapping[str, Any] | bool) -> str:
    """The Lark expression for a JSON value that matches ``schema``, without keys that an object
    does not declare unless the schema asks for them. Raises SchemaRefused."""
    enforced = with_closed_objects(enforceable(schema))
    if enforced is False:
        raise SchemaRefused("", "false", "allows nothing")
    options = {"x-guidance": compile_options(enforced)}
    return f"%json {json.dumps(options | ({} if enforced is True else enforced))}"


def choice(names: Sequence[str]) -> str:
    """The Lark expression for one of these rules."""
    return "(" + " | ".join(names) + ")"


def object_text(value: object) -> str | None:
    """The JSON text of an object; None for any other value, and for numbers that JSON does not
    have."""
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None
    # A model may have written a single surrogate, which has no UTF-8 encoding.
    halved = any("\ud800" <= character <= "\udfff" for character in text)
    return json.dumps(value) if halved else text


def strict_loads(text: str) -> Any:
    """The JSON value of a text. Raises ValueError, also for NaN and infinity."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(name)


@dataclass(slots=True)
class ValueScanner:
    """Finds the end of a JSON value that streams: ``ended`` once it is complete. It checks only
    brackets and strings, not whether the value is valid."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    ended: bool = False

    def feed(self, text: str) -> int:
        """Read characters up to the end of the value; returns how many."""
        for count, character in enumerate(text, 1):
            if self.in_string:
                if self.escaped:
                    self.escaped = False
                elif character == "\\":
                    self.escaped = True
                elif character == '"':
                    self.in_string = False
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
            if self.depth == 0 and not self.in_string:
                self.ended = True
                return count
        return len(text)


@dataclass(slots=True)
class StringScanner:
    """Whether a text with JSON is within a string, as it grows: of its first ``count`` characters
    each is looked at once."""

    count: int = 0
    inside: bool = False
    escaped: bool = False

    def is_inside(self, text: str, end: int) -> bool:
        """Whether ``text`` is within a string before index ``end``, at least ``count``."""
        for character in text[self.count : end]:
            if self.escaped:
                self.escaped = False
            elif character == '"':
                self.inside = not self.inside
            elif character == "\\":
                self.escaped = self.inside
        self.count = end
        return self.inside


def inside_string(text: str) -> bool:
    """Whether a text with JSON ends within a string."""
    return StringScanner().is_inside(text, len(text))
