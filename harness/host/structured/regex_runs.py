"""How long a text a regular expression forces by repeating literals, counted without writing it
out.

llguidance writes a forced text out when it reaches it, in some 320 bytes of memory a byte. What is
forced otherwise, such as by ``(ab|ab){9}``, is not counted here: ``grammar_worker`` measures it."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_FORCED = 100_000
"""Most characters, or bytes of UTF-8, of a text that a grammar may force."""
LONGEST_COUNTED = 64 << 10
"""Most characters of a regular expression that are read here."""
TOKEN = re.compile(
    r"""\\(?:[pP]\{[^}]*\}|[xuU]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)
    |\(\?P?<\w*>|\(\?[a-zA-Z-]*[:)]?|[*+?]\??|\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}\??|.""",
    re.DOTALL | re.VERBOSE,
)
CHOICES = frozenset("dDwWsSpPbBAzZGRXNhHvV")
"""Letters behind a backslash that stand for several characters or for none."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Lengths of texts that a part forces: at its ``begin``, at its ``end``, and the ``longest``.
    A ``fixed`` part has one text, which is both."""

    fixed: bool
    begin: int
    end: int
    longest: int

    def then(self, other: Runs) -> Runs:
        return Runs(
            self.fixed and other.fixed,
            self.begin + (other.begin if self.fixed else 0),
            other.end + (self.end if other.fixed else 0),
            max(self.longest, other.longest, self.end + other.begin),
        )

    def times(self, least: int, most: int | None) -> Runs:
        if most == 0:
            return EMPTY
        exact = least == most
        if self.fixed:
            length = self.begin * least
            return Runs(exact, length, length if exact else 0, max(length, self.longest))
        if not least:
            return Runs(False, 0, 0, self.longest)
        between = self.end + self.begin if least > 1 else 0
        return Runs(False, self.begin, self.end if exact else 0, max(self.longest, between))


EMPTY, LITERAL, CHOICE = Runs(True, 0, 0, 0), Runs(True, 1, 1, 1), Runs(False, 0, 0, 0)
COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def longest_run(regex: str) -> int:
    """Characters of the longest text that ``regex`` forces by repeating literals. 0 for what is
    too long to be read here, has flags or is malformed."""
    if len(regex) > LONGEST_COUNTED:
        return 0
    groups = [_Group()]
    at = 0
    while at < len(regex):
        found = TOKEN.match(regex, at)
        assert found is not None
        token, at = found[0], found.end()
        group = groups[-1]
        if token.startswith("(?") and not (token == "(?:" or token.endswith(">")):
            return 0
        if token[0] == "(":
            groups.append(_Group())
        elif token == ")":
            if len(groups) == 1:
                return 0
            groups.pop()
            groups[-1].add(group.whole())
        elif token == "|":
            group.begin_branch()
        elif token[0] in COUNTS:
            group.repeat(*COUNTS[token[0]])
        elif token[0] == "{" and (found[1] or found[3]):
            least = int(found[1][:9] or 0)
            most = int(found[3][:9]) if found[3] else (None if found[2] else least)
            group.repeat(least, most)
        elif token == "[":
            at = _end_of_class(regex, at)
            group.add(CHOICE)
        elif token in "^$":
            group.add(EMPTY)
        else:
            chosen = token == "." or (token[0] == "\\" and token[1:2] in CHOICES)
            group.add(CHOICE if chosen else LITERAL)
    return groups[0].whole().longest if len(groups) == 1 else 0


class _Group:
    """A group that is being read: its branches, and of the latest the last part apart, which may
    be repeated."""

    def __init__(self) -> None:
        self._branches, self._longest = 0, 0
        self._before = self._last = EMPTY

    def add(self, part: Runs) -> None:
        self._before, self._last = self._before.then(self._last), part

    def repeat(self, least: int, most: int | None) -> None:
        self._last = self._last.times(least, most)

    def begin_branch(self) -> None:
        self._longest = max(self._longest, self._before.then(self._last).longest)
        self._branches += 1
        self._before = self._last = EMPTY

    def whole(self) -> Runs:
        latest = self._before.then(self._last)
        if not self._branches:
            return latest
        return Runs(False, 0, 0, max(self._longest, latest.longest))


def _end_of_class(regex: str, at: int) -> int:
    """The position behind a character class whose inside begins at ``at``."""
    depth = 1
    if regex.startswith("^", at):
        at += 1
    if regex.startswith("]", at):
        at += 1
    while at < len(regex) and depth:
        if regex[at] == "\\":
            at += 1
        else:
            depth += {"[": 1, "]": -1}.get(regex[at], 0)
        at += 1
    return at
