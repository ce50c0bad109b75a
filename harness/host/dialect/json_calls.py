"""Calls in JSON: in tags (Hermes, Qwen), as a list in tags (Nemotron, Command R7B, Apertus),
without marks (Llama 3), or after a token (Mistral)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.host.dialect.calls import (
    Call,
    CallSyntax,
    Function,
    Functions,
    Marks,
    StringScanner,
    choice,
    json_rule,
    literal,
    object_text,
    strict_loads,
)

SPACE = r"[ \t\r\n]*"
NAMED_CALL = re.compile(
    rf"{SPACE}([a-zA-Z0-9_-]+)(?:\[CALL_ID\][a-zA-Z0-9_-]*)?(?:\[ARGS\])?{SPACE}(\{{.*\}}){SPACE}",
    re.S,
)
DECODER = json.JSONDecoder()
SEAM = re.compile(rf"<tool_call>|(?<=\}}){SPACE}[,;]?{SPACE}(?=\{{)")
"""The separator of two calls in one pair of tags."""
NEXT_OBJECT = re.compile(rf"(?<=\}}){SPACE}[,;]?{SPACE}\{{")
"""The separator of two calls that are JSON objects without tags."""
BARE = '{"name"'
BARE_HEAD = re.compile(
    rf'\{{"name"{SPACE}(?:(?::{SPACE}(?:"[^"\\]*)?)?|:{SPACE}"(?P<name>[^"\\]*)".*)', re.S
)
"""The beginning of a call without its tag, with the name once it is whole."""
FENCE, FENCE_END = "```json", "```"
FENCED_HEAD = '{"name":"'
LONGEST_FENCED_HEAD = 256
"""Characters at the beginning of a fenced text in which a call has its name."""
KEYS = ("arguments", "parameters")
"""The keys under which models write the arguments of a call."""
CALL_ID = '"tool_call_id": "'


@dataclass(frozen=True)
class JsonObjectCalls(CallSyntax):
    """``{"name": ..., "arguments": {...}}``, with the arguments under ``key``. With ``fenced`` also
    in a Markdown fence."""

    key: str = "arguments"
    before: str = ""
    after: str = ""
    fenced: bool = False

    separator = "\n"

    @property
    def begins_each_call(self) -> bool:
        return True

    @property
    def bare_marks(self) -> tuple[str, str] | None:
        return None if self.end is None else (BARE, self.end)

    @property
    def fence_marks(self) -> Mapping[str, str]:
        return {FENCE: FENCE_END} if self.fenced else {}

    def cannot_become_call(self, body: str, functions: Functions) -> bool:
        if body.startswith(FENCE):
            return not _may_be_fenced_call(body.removeprefix(FENCE), functions)
        found = BARE_HEAD.fullmatch(body)
        if found is None or found["name"] not in (None, *functions):
            return True
        try:
            _, end = DECODER.raw_decode(body)
        except (ValueError, RecursionError):
            return False
        rest, close = body[end:].lstrip(), self.end or ""
        return not rest.startswith(close) and not close.startswith(rest)

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        if self.fenced and body.startswith(FENCE):
            return _fenced_calls(body.removeprefix(FENCE).removesuffix(FENCE_END), functions)
        if self.end is not None and body.startswith(BARE):
            body = body.removesuffix(self.end)
        call = _call_of(body, self.key, functions)
        return _list_of_calls(body, functions) if call is None else [call]

    def call_boundaries(self, body: str) -> Iterator[tuple[int, int]]:
        for found in re.finditer(SEAM, body):
            yield found.span()

    def arguments_start(self, body: str) -> tuple[str, int] | None:
        return _arguments_start(body, self.key)

    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        names, rules = _call_rules(functions, self.key)
        end = [] if self.end is None else [marks.written(self.end)]
        whole = [literal(self.before), choice(names), literal(self.after), *end]
        return ["calls: " + " ".join(part for part in whole if part != '""'), *rules]


@dataclass(frozen=True)
class JsonListCalls(CallSyntax):
    """``[{"name": ..., "arguments": {...}}, ...]`` in tags, without ``end`` up to the end of the
    answer; ``names`` are the two keys. With ``numbered`` each call begins with a ``tool_call_id``,
    a number. ``blank`` stands around the list."""

    names: tuple[str, str] = ("name", KEYS[0])
    numbered: bool = False
    blank: str = ""

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        return _list_of_calls(body, functions, *self.names)

    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        calls, *rules = _list_rules(functions, many, *self.names, self.numbered)
        blank = [literal(self.blank)] if self.blank else []
        end = [] if self.end is None else [marks.written(self.end)]
        whole = [*blank, calls.removeprefix("calls: "), *blank, *end]
        return [f"calls: {' '.join(whole)}", *rules]


COMMAND_CALLS = JsonListCalls(
    "<|START_ACTION|>", "<|END_ACTION|>", ("tool_name", "parameters"), numbered=True
)
"""The calls of Command R7B."""


@dataclass(frozen=True)
class KeyedJsonCalls(CallSyntax):
    """Apertus: ``[{NAME: {...}}, ...]`` in tags."""

    begin: str = "<|tools_prefix|>"
    end: str | None = "<|tools_suffix|>"

    ends_answer = True

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        try:
            values = strict_loads(body)
        except (ValueError, RecursionError):
            return None
        calls = []
        for value in values if isinstance(values, list) else [values]:
            if (
                not isinstance(value, dict)
                or len(value) != 1
                or not value.keys() <= functions.keys()
            ):
                return None
            ((name, arguments),) = value.items()
            text = object_text(arguments)
            if text is None:
                return None
            calls.append(Call(name, text))
        # An empty list is text.
        return calls or None

    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        assert self.end is not None
        one = choice([f"call_{n}" for n in range(len(functions))])
        more = f' (", " {one})*' if many else ""
        heads = [literal(f'{{"{each.name}": ') for each in functions]
        return [
            f'calls: "[" {one}{more} "]" {marks.written(self.end)}',
            *(
                f"call_{n}: {heads[n]} {json_rule(each.parameters)} {literal('}')}"
                for n, each in enumerate(functions)
            ),
        ]


@dataclass(frozen=True)
class BareJsonCall(CallSyntax):
    """Llama 3: an answer that is one JSON object, ``{"name": ..., "parameters": {...}}``. Several
    objects, with or without ``;`` or ``,`` between them, are read too."""

    begin: str = "{"
    end: str | None = None

    only_first = True

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        call = _call_of("{" + body, "parameters", functions)
        return None if call is None else [call]

    def call_boundaries(self, body: str) -> Iterator[tuple[int, int]]:
        for found in re.finditer(NEXT_OBJECT, body):
            yield found.span()

    def arguments_start(self, body: str) -> tuple[str, int] | None:
        found = _arguments_start("{" + body, "parameters")
        return None if found is None else (found[0], found[1] - 1)

    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        names, rules = _call_rules(functions, "parameters", opened=True)
        return [f"calls: {choice(names)}", *rules]


@dataclass(frozen=True)
class MistralCalls(CallSyntax):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or with ``named`` the newer
    ``[TOOL_CALLS]name[ARGS]{...}`` for each call. Both are read."""

    begin: str = "[TOOL_CALLS]"
    end: str | None = None
    named: bool = False

    short_ids = True

    @property
    def begins_each_call(self) -> bool:
        return self.named

    @property
    def inner_marks(self) -> tuple[str, ...]:
        return ("[ARGS]", "[CALL_ID]")

    def parse(self, body: str, functions: Functions) -> list[Call] | None:
        calls = []
        for part in self._parts(body):
            found = _list_of_calls(part, functions) or _named_call(part, functions)
            if found is None:
                return None
            calls.extend(found)
        return calls

    def _parts(self, body: str) -> list[str]:
        """``body`` split at its marks, except within JSON strings."""
        parts: list[str] = []
        start = at = 0
        strings = StringScanner()
        while (at := body.find(self.begin, at)) >= 0:
            inside, at = strings.is_inside(body, at), at + len(self.begin)
            if not inside:
                parts.append(body[start : at - len(self.begin)])
                start, strings = at, StringScanner(count=at)
        return [*parts, body[start:]]

    def rules(self, functions: Sequence[Function], many: bool, marks: Marks) -> list[str]:
        if self.named:
            between = marks.written("[ARGS]")
            rules = [
                f"call_{n}: {literal(one.name)} {between} {json_rule(one.parameters)}"
                for n, one in enumerate(functions)
            ]
            return [f"calls: {choice([f'call_{n}' for n in range(len(functions))])}", *rules]
        return _list_rules(functions, many)


def _call_rules(
    functions: Sequence[Function],
    key: str,
    opened: bool = False,
    name: str = "name",
    numbered: bool = False,
) -> tuple[list[str], list[str]]:
    """The names and texts of a rule for each function."""
    rules = []
    begin = "" if opened else "{"
    number = f"{literal(begin + CALL_ID)} /[0-9]{{1,3}}/ " if numbered else ""
    for n, one in enumerate(functions):
        head = ('", ' if numbered else begin) + f'"{name}": "{one.name}", "{key}": '
        whole = f"{number}{literal(head)} {json_rule(one.parameters)} {literal('}')}"
        rules.append(f"call_{n}: {whole}")
    return [f"call_{n}" for n in range(len(functions))], rules


def _list_rules(
    functions: Sequence[Function],
    many: bool,
    name: str = "name",
    key: str = KEYS[0],
    numbered: bool = False,
) -> list[str]:
    """Lark rules for a list of calls; without ``many`` for a list of one."""
    names, rules = _call_rules(functions, key, name=name, numbered=numbered)
    one = choice(names)
    more = f' (", " {one})*' if many else ""
    return [f'calls: "[" {one}{more} "]"', *rules]


def _call_of(text: str, key: str, functions: Functions) -> Call | None:
    """The only call in a text."""
    found = _arguments_start(text, key)
    try:
        value = strict_loads(text)
    except (ValueError, RecursionError):
        return None
    call = _checked(value, key, functions)
    if call is None or found is None:
        return call if call is not None or key != KEYS[0] else _unlisted(value, functions)
    # Keep the model's own text, so that it gives the same tokens when it is sent back.
    try:
        arguments, end = DECODER.raw_decode(text, found[1])
    except (ValueError, RecursionError):
        return call
    if arguments != value[key]:
        return call
    return Call(call.name, text[found[1] : end])


def _unlisted(value: object, functions: Functions) -> Call | None:
    """A call with missing or null arguments, or with the arguments under the other key."""
    other = _checked(value, KEYS[1], functions)
    if other is not None or not isinstance(value, dict) or value.get("name") not in functions:
        return other
    given = [value[key] for key in KEYS if value.get(key) is not None]
    return None if given else Call(value["name"], "{}")


def _checked(value: object, key: str, functions: Functions, name: str = "name") -> Call | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]  # as in a request
    if not isinstance(value, dict) or value.get(name) not in functions:
        return None
    arguments: Any = value.get(key)
    if isinstance(arguments, str):
        # Some models write the arguments as a text that holds JSON.
        try:
            arguments = strict_loads(arguments)
        except (ValueError, RecursionError):
            return None
    text = object_text(arguments)
    return None if text is None else Call(value[name], text)


def _arguments_start(text: str, key: str) -> tuple[str, int] | None:
    found = re.match(
        rf'{SPACE}\{{{SPACE}"name"{SPACE}:{SPACE}"([^"\\]*)"{SPACE},{SPACE}"{key}"{SPACE}:{SPACE}'
        r"(?=\{)",
        text,
    )
    return None if found is None else (found[1], found.end())


def _list_of_calls(
    text: str, functions: Functions, name: str = "name", key: str = KEYS[0]
) -> list[Call] | None:
    try:
        values = strict_loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(values, dict):
        values = [values]
    if not isinstance(values, list):
        return None
    calls = [_checked(value, key, functions, name) for value in values]
    # An empty list is text.
    return [call for call in calls if call is not None] if calls and all(calls) else None


def _may_be_fenced_call(text: str, functions: Functions) -> bool:
    """Whether an unfinished fenced text may become calls of ``functions``."""
    head = re.sub(r"[ \t\r\n]", "", text[:LONGEST_FENCED_HEAD])
    if len(head) < len(FENCED_HEAD):
        return FENCED_HEAD.startswith(head)
    name, closed, _ = head.removeprefix(FENCED_HEAD).partition('"')
    named = name in functions if closed else any(one.startswith(name) for one in functions)
    return head.startswith(FENCED_HEAD) and named


def _fenced_calls(text: str, functions: Functions) -> list[Call] | None:
    """The calls in a fenced text. Each has only a name and arguments, which distinguishes it from a
    description of a function."""
    calls: list[Call] = []
    left = text.strip()
    while left:
        try:
            value, end = DECODER.raw_decode(left)
        except (ValueError, RecursionError):
            return None
        call = _call_of(left[:end], KEYS[0], functions)
        if call is None or set(value) != {"name", KEYS[0]}:
            return None
        calls.append(call)
        left = left[end:].lstrip()
    return calls or None


def _named_call(text: str, functions: Functions) -> list[Call] | None:
    found = NAMED_CALL.fullmatch(text)
    if found is None or found[1] not in functions:
        return None
    try:
        arguments = strict_loads(found[2])
    except (ValueError, RecursionError):
        return None
    return [Call(found[1], found[2])] if isinstance(arguments, dict) else None
