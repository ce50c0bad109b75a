"""The choices of a request in the making, and the pieces in which they become certain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from contract.types import FinishReason, Request, TokenEvent
from harness.host.reply import Part, ReplyParser, joined
from reference.model.text_stream import TextStream

TOOL_CALLS = "tool_calls"
"""How an answer ends that calls tools."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain of a choice: text, and the parts of an answer it is made of where that
    is known, the tokens it came with, that which ended it included, and how it ended if it did."""

    choice: int
    text: str
    parts: tuple[Part, ...] = ()
    events: tuple[TokenEvent, ...] = ()
    finish: str | None = None


@dataclass(slots=True)
class Choice:
    """One continuation: its engine request, and what is known of it; ``parser`` takes its text
    apart, and one of ``stop_tokens`` ends it. Times are monotonic seconds; ``intervals`` are
    those between its tokens."""

    index: int
    request: Request
    stream: TextStream
    parser: ReplyParser | None = None
    stop_tokens: frozenset[int] = frozenset()
    tokens: int = 0
    masked: list[int] = field(default_factory=list)
    """The tokens of a choice whose tokens a grammar masks."""
    reasoning_tokens: int = 0
    finish: str | None = None
    first: float | None = None
    latest: float | None = None
    intervals: list[float] = field(default_factory=list)


def parts_of(choice: Choice, text: str, counted: bool) -> tuple[Part, ...]:
    """What more text of a choice says, and the end it may bring; ``counted`` text is a token's."""
    parser = choice.parser
    if parser is None:
        return ()
    before = parser.thinking
    parts = parser.feed(text)
    choice.reasoning_tokens += counted and (before or parser.thinking)
    complete = parser.complete
    if choice.finish is not None:
        parts = joined([*parts, *parser.finish()])
    if complete or (parser.calls and choice.finish == FinishReason.STOP.value):
        choice.finish = TOOL_CALLS
    return tuple(parts)


def count(choice: Choice, at: float) -> None:
    """One more token of a choice came at a time, in monotonic seconds."""
    choice.tokens += 1
    if choice.latest is None:
        choice.first = at
    else:
        choice.intervals.append(at - choice.latest)
    choice.latest = at


def joined_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """One piece for each choice, in the order of their first."""
    joined: dict[int, Piece] = {}
    for piece in pieces:
        before = joined.get(piece.choice)
        if before is not None:
            piece = Piece(
                piece.choice,
                before.text + piece.text,
                (*before.parts, *piece.parts),
                before.events + piece.events,
                piece.finish,
            )
        joined[piece.choice] = piece
    return list(joined.values())
