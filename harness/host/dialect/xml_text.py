"""Reads tags of calls that no grammar enforced: some tags are missing, and values may contain whole
calls."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass

HEAD = re.compile(r"\s*<function=([^>\n]+)>")
TAG = re.compile(
    r"(?P<open><function=[^>\n]+>|<invoke name=[^>\n]+>)|(?P<close></function>|</invoke>)"
    r"|(?P<parameter>\s*<parameter=(?P<name>[^>\n]+)>)|(?P<end></parameter>)"
)
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
CLOSE = "</function>"


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """The function's name and the text of each parameter."""

    name: str
    parameters: dict[str, str]


def name_called(text: str) -> str | None:
    """The name in a text that begins a call; None for any other text."""
    found = HEAD.match(text)
    return None if found is None else found[1]


def read_tags(text: str, declared: Set[str] | None, cut: bool = False) -> TaggedCall | bool:
    """The call that ``text`` is; True if it ends within a value, False if it is not a call.
    ``declared``: names that parameters may have, None for any.

    A missing ``</parameter>`` is assumed before a tag that can follow it. A call within a value is
    part of the value. With ``cut`` the text may end within a value; then values contain no
    calls."""
    head = HEAD.match(text)
    if head is None:
        return False
    parameters: dict[str, str] = {}
    at = head.end()
    while (found := PARAMETER.match(text, at)) is not None:
        if found[1] in parameters:
            return False
        given = parameters.keys() | {found[1]}
        end, at = _value_end(text, found.end(), given, declared, cut)
        if end < 0:
            return True
        parameters[found[1]] = text[found.end() : end]
    rest = text[at:].strip()
    return TaggedCall(head[1], parameters) if rest in ("", CLOSE) else False


def _value_end(
    text: str, start: int, given: Set[str], declared: Set[str] | None, cut: bool
) -> tuple[int, int]:
    """Indices of the end of the value from ``start`` on, and of the text after it; -1 if it does
    not end."""
    depth = 0
    for tag in TAG.finditer(text, start):
        if tag["open"] and not cut:
            depth += 1
        elif tag["close"] and depth:
            depth -= 1
        elif depth:
            continue
        elif tag["close"] == CLOSE:
            return tag.start(), tag.start()
        elif tag["end"]:
            return tag.start(), tag.end()
        elif (
            tag["name"] and tag["name"] not in given and tag["name"] in (declared or {tag["name"]})
        ):
            return tag.start(), tag.start()
    return (len(text), len(text)) if cut else (-1, -1)
