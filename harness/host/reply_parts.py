"""The parts of an answer: text, reasoning, and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of tool call ``index`` of an answer, of the function ``name``."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the arguments of call ``index``."""

    index: int
    text: str


Part = Content | ReasoningText | CallBegin | CallArguments


def joined(parts: Iterable[Part]) -> list[Part]:
    """Parts with adjacent ones of the same kind joined."""
    parts = list(parts)
    if len(parts) < 2:
        return parts
    found: list[Part] = []
    for part in parts:
        match found[-1] if found else None, part:
            case (Content(text), Content(more)):
                found[-1] = Content(text + more)
            case (ReasoningText(text), ReasoningText(more)):
                found[-1] = ReasoningText(text + more)
            case (CallArguments(index, text), CallArguments(same, more)) if index == same:
                found[-1] = CallArguments(index, text + more)
            case _:
                found.append(part)
    return found
