"""A reader of values that are almost JSON: objects, lists, words and numbers, with a syntax's own
strings and keys."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.host.dialect.calls import choice

KEY = re.compile(r"[a-zA-Z0-9_.-]+")
SCALAR = re.compile(r"true|false|null|None|True|False|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
WORDS: Mapping[str, bool | None] = {"None": None, "True": True, "False": False}
"""Python's words for JSON's null, true and false."""
DEEPEST = 32


class Malformed(Exception):
    """A text that does not follow the syntax."""


@dataclass(slots=True)
class ValueReader(ABC):
    """Reads one value after another from ``text``, beginning at ``at``."""

    text: str
    at: int

    @abstractmethod
    def string(self) -> str | None:
        """The string at the current position; None for any other value. Raises Malformed."""

    @abstractmethod
    def key(self) -> str:
        """The key of an object at the current position. Raises Malformed."""

    def value(self, depth: int = 0) -> Any:
        """The value at the current position. Raises Malformed."""
        if depth > DEEPEST:
            raise Malformed
        self.skip()
        text = self.string()
        if text is not None:
            return text
        if self.takes("{"):
            return self._members(depth)
        if self.takes("["):
            return self._items(depth)
        return self._scalar()

    def takes(self, text: str) -> bool:
        """Skip ``text`` if it is at the current position; returns whether it was."""
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def skip(self) -> None:
        """Step over blanks."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def closes(self, bracket: str, has_some: bool) -> bool:
        """Skip ``bracket`` and return True if the container ends here. Otherwise skip the comma
        that must come before another part."""
        self.skip()
        if self.takes(bracket):
            return True
        if has_some and not self.takes(","):
            raise Malformed
        self.skip()
        return False

    def word(self, pattern: re.Pattern[str]) -> str:
        """The match of ``pattern`` at the current position. Raises Malformed."""
        found = pattern.match(self.text, self.at)
        if found is None:
            raise Malformed
        self.at = found.end()
        return found[0]

    def _members(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self.closes("}", bool(members)):
            key = self.key()
            self.skip()
            if key in members or not self.takes(":"):
                raise Malformed
            members[key] = self.value(depth + 1)
        return members

    def _items(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self.closes("]", bool(items)):
            items.append(self.value(depth + 1))
        return items

    def _scalar(self) -> Any:
        word = self.word(SCALAR)
        try:
            return WORDS[word] if word in WORDS else json.loads(word)
        except ValueError:  # more digits than Python converts
            raise Malformed from None


def sequence(members: Sequence[tuple[str, bool]], comma: str, add: Callable[[str], str]) -> str:
    """The Lark expression for members in order, each (rule name, required), with ``comma`` between
    those that are present. ``add`` adds a rule and returns its name."""
    after = '""'
    firsts: list[str] = []
    for name, needed in reversed(members):
        first = f"{name} {after}"
        firsts = [first] if needed else [first, *firsts]
        with_comma = f"({comma} {name})" + ("" if needed else "?")
        after = add(f"{with_comma} {after}")
    if not any(needed for _, needed in members):
        firsts.append('""')
    return choice(firsts)
