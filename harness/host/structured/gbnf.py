"""Translates grammars in GBNF, the notation of llama.cpp, to llguidance's Lark dialect.

GBNF describes sequences of characters. llguidance's lexer reads the longest possible lexeme. Both
mean the same if the whole grammar is one lexeme, or if every lexeme is one character. So a grammar
without recursion becomes one regular expression, and any other one rules of single characters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from harness.host.structured.grammars import GrammarRefused, check_run

ROOT = "root"
MAX_CHARACTERS = 256 << 10
"""Most characters of a grammar."""
LONGEST_REGEX = 64 << 10
"""Most characters of the regular expression of a whole grammar."""
MAX_REPEATS = 100_000
"""Largest number in braces."""
DEEPEST = 100
"""Deepest nesting of groups."""
MAX_SUFFIXES = 2
"""Most repetitions of one part, such as ``(a+)*``, which also nest."""
NAME = re.compile(r"[a-zA-Z0-9-]+")
BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
BLANK_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
COUNT = re.compile(r"\{[ \t]*(\d*)[ \t]*(,?)[ \t]*(\d*)[ \t]*\}")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}
HEX = {"x": 2, "u": 4, "U": 8}
ANY = r"[\x{0}-\x{10FFFF}]"


@dataclass(frozen=True, slots=True)
class Text:
    """The characters of a literal."""

    text: str


@dataclass(frozen=True, slots=True)
class CharacterClass:
    """One character of a class, as a regular expression."""

    regex: str


@dataclass(frozen=True, slots=True)
class RuleName:
    """A reference to a rule; ``at`` is its position in the text."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class InOrder:
    """A sequence."""

    parts: tuple[GbnfNode, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """A choice."""

    parts: tuple[GbnfNode, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """A part repeated ``minimum`` to ``maximum`` times; None means any number."""

    part: GbnfNode
    minimum: int
    maximum: int | None


GbnfNode = Text | CharacterClass | RuleName | InOrder | OneOf | Repeated


def gbnf_rules(text: str) -> str:
    """The Lark rules of a grammar, beginning with ``body``. Raises GrammarRefused with line and
    column."""
    if len(text) > MAX_CHARACTERS:
        raise GrammarRefused(f"has more than {MAX_CHARACTERS} characters")
    reader = _GbnfReader(text)
    rules = reader.rules()
    for rule in rules.values():
        for name in _names(rule):
            if name.name not in rules:
                reader.refuse(f"there is no rule {name.name[:64]!r}", name.at)
    if ROOT not in rules:
        reader.refuse(f"there is no rule {ROOT!r}", len(text))
    order = _without_recursion(rules)
    if order is not None:
        regex = _whole_regex(rules, order)
        if regex is not None:
            check_run(regex)
            return f"body: /{regex}/" if regex else 'body: ""'
    ids = {name: f"rule{number}" for number, name in enumerate(rules)}
    lines = [f"{ids[name]}: {_lark(rule, ids)}" for name, rule in rules.items()]
    return "\n".join([f"body: {ids[ROOT]}", *lines])


class _GbnfReader:
    """Reads a grammar from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def refuse(self, problem: str, at: int | None = None) -> NoReturn:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        raise GrammarRefused(f"line {line}, column {column}: {problem}")

    def rules(self) -> dict[str, GbnfNode]:
        """Every rule by its name."""
        found: dict[str, GbnfNode] = {}
        self._skip(BLANK_LINES)
        while self._at < len(self._text):
            name, at = self._name(), self._at
            self._skip(BLANK)
            if not self._text.startswith("::=", self._at):
                self.refuse("::= is missing behind the name of a rule")
            self._at += 3
            self._skip(BLANK_LINES)
            if name in found:
                self.refuse(f"there are two rules {name[:64]!r}", at - len(name))
            found[name] = self._alternatives(nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                self.refuse(f"{self._text[self._at]!r} is not expected here")
            self._skip(BLANK_LINES)
        return found

    def _skip(self, blanks: re.Pattern[str]) -> None:
        found = blanks.match(self._text, self._at)
        self._at = self._at if found is None else found.end()

    def _name(self) -> str:
        found = NAME.match(self._text, self._at)
        if found is None:
            self.refuse("the name of a rule is missing")
        self._at = found.end()
        return found[0]

    def _alternatives(self, nested: bool) -> GbnfNode:
        blanks = BLANK_LINES if nested else BLANK
        parts = [self._sequence(blanks)]
        while self._text.startswith("|", self._at):
            self._at += 1
            self._skip(BLANK_LINES)
            parts.append(self._sequence(blanks))
        return parts[0] if len(parts) == 1 else OneOf(tuple(parts))

    def _sequence(self, blanks: re.Pattern[str]) -> GbnfNode:
        parts: list[GbnfNode] = []
        while (part := self._part()) is not None:
            self._skip(blanks)
            parts.append(self._repeated(part, blanks))
        return parts[0] if len(parts) == 1 else InOrder(tuple(parts))

    def _part(self) -> GbnfNode | None:
        """The element at the current position; None at the end of a sequence."""
        character = self._text[self._at : self._at + 1]
        if character == '"':
            return self._literal()
        if character == "[":
            return self._class()
        if character == ".":
            self._at += 1
            return CharacterClass(ANY)
        if character == "(":
            return self._group()
        if character in ("<", "!"):
            self.refuse("tokens cannot be named in a grammar here")
        at = self._at
        if NAME.match(self._text, at):
            return RuleName(self._name(), at)
        if character in ("*", "+", "?", "{"):
            self.refuse(f"{character!r} repeats nothing")
        return None

    def _group(self) -> GbnfNode:
        self._depth += 1
        if self._depth > DEEPEST:
            self.refuse(f"more than {DEEPEST} groups stand within each other")
        self._at += 1
        self._skip(BLANK_LINES)
        inner = self._alternatives(nested=True)
        if not self._text.startswith(")", self._at):
            self.refuse(") is missing")
        self._at += 1
        self._depth -= 1
        return inner

    def _repeated(self, part: GbnfNode, blanks: re.Pattern[str]) -> GbnfNode:
        suffixes = 0
        while (character := self._text[self._at : self._at + 1]) and character in "*+?{":
            suffixes += 1
            if suffixes > MAX_SUFFIXES:
                self.refuse(f"more than {MAX_SUFFIXES} repetitions of one part")
            minimum, maximum = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(character, (0, 0))
            if character == "{":
                minimum, maximum = self._counts()
            else:
                self._at += 1
            part = Repeated(part, minimum, maximum)
            self._skip(blanks)
        return part

    def _counts(self) -> tuple[int, int | None]:
        found = COUNT.match(self._text, self._at)
        if found is None or not (found[1] or found[3]):
            self.refuse("a number of times is missing")
        minimum = int(found[1][:9] or 0)
        maximum = int(found[3][:9]) if found[3] else (None if found[2] else minimum)
        if max(minimum, maximum or 0) > MAX_REPEATS:
            self.refuse(f"more than {MAX_REPEATS} times")
        if maximum is not None and maximum < minimum:
            self.refuse("the larger number comes first")
        self._at = found.end()
        return minimum, maximum

    def _literal(self) -> Text:
        begin = self._at
        self._at += 1
        characters = []
        while not self._text.startswith('"', self._at):
            if self._at >= len(self._text):
                self.refuse("a text has no end", begin)
            characters.append(self._character())
        self._at += 1
        return Text("".join(characters))

    def _class(self) -> CharacterClass:
        begin = self._at
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        ranges = []
        while not self._text.startswith("]", self._at):
            if self._at >= len(self._text):
                self.refuse("a class has no end", begin)
            first = last = self._character()
            if self._text.startswith("-", self._at) and self._text[
                self._at + 1 : self._at + 2
            ] not in ("", "]"):
                self._at += 1
                last = self._character()
            if last < first:
                self.refuse("a range ends before it begins")
            ranges.append(f"{_coded(first)}-{_coded(last)}")
        self._at += 1
        if not ranges and not negated:
            self.refuse("a class has no character", begin)
        return CharacterClass(f"[{'^' * negated}{''.join(ranges)}]" if ranges else ANY)

    def _character(self) -> str:
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return character
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in HEX:
            digits = self._text[self._at : self._at + HEX[kind]]
            value = int(digits, 16) if re.fullmatch(f"[0-9a-fA-F]{{{HEX[kind]}}}", digits) else -1
            if not 0 <= value <= 0x10FFFF or 0xD800 <= value < 0xE000:
                self.refuse(f"\\{kind} needs {HEX[kind]} hex digits of a character")
            self._at += HEX[kind]
            return chr(value)
        if kind not in ESCAPES:
            self.refuse(f"there is no escape \\{kind}", self._at - 2)
        return ESCAPES[kind]


def _names(node: GbnfNode) -> Iterator[RuleName]:
    """The rules that a part refers to."""
    match node:
        case RuleName():
            yield node
        case InOrder(parts) | OneOf(parts):
            for part in parts:
                yield from _names(part)
        case Repeated(part):
            yield from _names(part)


def _without_recursion(rules: Mapping[str, GbnfNode]) -> list[str] | None:
    """The rules that the root needs, each after those it refers to; None if a rule refers to
    itself, directly or not."""
    order: list[str] = []
    state: dict[str, bool] = {}
    waiting = [(ROOT, False)]
    while waiting:
        name, left = waiting.pop()
        if left:
            state[name] = True
            order.append(name)
        elif name not in state:
            state[name] = False
            waiting.append((name, True))
            for inner in {one.name for one in _names(rules[name])}:
                if state.get(inner) is False:
                    return None
                waiting.append((inner, False))
    return order


def _whole_regex(rules: Mapping[str, GbnfNode], order: list[str]) -> str | None:
    """The root rule as a regular expression; None if that is too long."""
    known: dict[str, str] = {}
    for name in order:
        pieces, length = [], 0
        for piece in _regex(rules[name], known):
            pieces.append(piece)
            length += len(piece)
            if length > LONGEST_REGEX:
                return None
        known[name] = "".join(pieces)
    return known[ROOT]


def _regex(node: GbnfNode, known: Mapping[str, str]) -> Iterator[str]:
    """The pieces of the regular expression of a part."""
    match node:
        case Text(text):
            yield from map(_coded, text)
        case CharacterClass(regex):
            yield regex
        case RuleName(name):
            yield f"(?:{known[name]})"
        case InOrder(parts):
            for part in parts:
                yield "(?:"
                yield from _regex(part, known)
                yield ")"
        case OneOf(parts):
            for number, part in enumerate(parts):
                yield "|" if number else "(?:"
                yield from _regex(part, known)
            yield ")"
        case Repeated(part, minimum, maximum):
            yield "(?:"
            yield from _regex(part, known)
            yield f"){{{minimum},{'' if maximum is None else maximum}}}"


def _lark(node: GbnfNode, ids: Mapping[str, str]) -> str:
    """A part as Lark with single characters."""
    match node:
        case Text(text):
            return " ".join(f"/{_coded(character)}/" for character in text) or '""'
        case CharacterClass(regex):
            return f"/{regex}/"
        case RuleName(name):
            return ids[name]
        case InOrder(parts):
            return " ".join(f"({_lark(part, ids)})" for part in parts) or '""'
        case OneOf(parts):
            return "(" + " | ".join(_lark(part, ids) for part in parts) + ")"
        case Repeated(part, minimum, maximum):
            times = f"{{{minimum},{'' if maximum is None else maximum}}}"
            return f"({_lark(part, ids)}){times}"


def _coded(character: str) -> str:
    """A character as an escape in a regular expression."""
    return rf"\x{{{ord(character):X}}}"
