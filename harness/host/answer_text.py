"""Turns the engine's events of a request into the text of its answer. All callers use it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from contract.errors import NonFiniteLogits, ZincError
from contract.types import FinishReason, Request, TokenEvent
from reference.model.text_stream import TextStream
from reference.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from harness.host.reply import Part, ReplyParser
    from harness.host.structured.grammars import TokenMasks

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that calls tools."""
NO_TOKENS: frozenset[int] = frozenset()


class ClientTooSlow(ZincError):
    """Nobody took the tokens of a request for too many steps, so the engine ended it."""


class Piece(NamedTuple):
    """The next piece of the answer numbered ``choice``: its text, the parts that a parser makes of
    that text, the events of its tokens, and how the answer ended if it did."""

    choice: int
    text: str
    parts: tuple[Part, ...] = ()
    events: tuple[TokenEvent, ...] = ()
    finish: str | None = None

    @property
    def token(self) -> int | None:
        """The last token of the piece, None where it is no token of the text."""
        last = self.events[-1] if self.events else None
        return None if last is None or last.finish_reason is FinishReason.STOP else last.token


class CancelsRequests(Protocol):
    """A stream of events whose requests can be ended."""

    def cancel(self, request_id: int, used: int) -> None:
        """End a request whose answer has ``used`` tokens."""


class AnswerText:
    """The answer to ``request`` as its events come; ``index`` numbers it among several.

    ``finish_reason`` is None until it ends. ``first`` and ``latest`` are the monotonic times of its
    tokens in seconds, and ``intervals`` the times between two tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        index: int = 0,
        *,
        parser: ReplyParser | None = None,
        shown: Collection[int] = NO_TOKENS,
        stop_tokens: Collection[int] = NO_TOKENS,
        masks: TokenMasks | None = None,
    ) -> None:
        """``parser`` divides the text into parts. ``shown`` are control tokens whose text belongs
        to the answer; one of ``stop_tokens`` ends it and does not. ``masks`` hold it to a grammar.
        Raises RequestError for stop strings that are not supported."""
        self.index = index
        self.request = request
        self.parser = parser
        self.sampled: list[int] = []
        """Every token, also one that ended the answer and is not part of its text."""
        self.finish_reason: FinishReason | None = None
        self.reasoning_tokens = 0
        self.first: float | None = None
        self.latest: float | None = None
        self.intervals: list[float] = []
        self._tokenizer = tokenizer
        self._shown = shown
        self._stop_tokens = stop_tokens
        self._masks = masks
        self._stream = TextStream(request.stop)
        self._text: list[str] = []
        self._text_tokens = 0
        self._called = False

    @property
    def tokens(self) -> list[int]:
        """The tokens of the text so far."""
        return self.sampled[: self._text_tokens]

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stream.stop_string

    @property
    def finish(self) -> str | None:
        """Finish reason in the words of OpenAI's API; None until the answer ends."""
        if self.finish_reason is None:
            return None
        return TOOL_CALLS if self._called else self.finish_reason.value

    def receive(self, event: TokenEvent, stream: CancelsRequests, at: float = 0.0) -> Piece | None:
        """As ``take``; where the answer ends before the engine ends its request, ``stream`` ends
        the request."""
        piece = self.take(event, at)
        if piece is not None and piece.finish is not None and event.finish_reason is None:
            stream.cancel(event.request_id, len(self.sampled))
        return piece

    def take(self, event: TokenEvent, at: float = 0.0) -> Piece | None:
        """The piece that the next event makes certain; None once the answer has ended. ``at`` is
        when the event was read, in monotonic seconds. Raises NonFiniteLogits, ClientTooSlow, and
        GrammarBroke where no token can follow."""
        if self.finish_reason is not None:
            return None
        token, reason = event.token, event.finish_reason
        if reason is not None:
            self._check(event)
        if token >= 0:
            self._count(token, at)
            if token in self._stop_tokens and reason is not FinishReason.STOP:
                # The engine goes on; tokens that it computes from here on are not delivered.
                reason = FinishReason.STOP
                event = event._replace(finish_reason=reason)
        stream, text = self._stream, ""
        is_text = token >= 0 and reason is not FinishReason.STOP
        if is_text:
            self._text_tokens += 1
            text = self._text_of(token)
        if reason is not None:
            text += stream.finish()
        self.finish_reason = FinishReason.STOP if stream.stopped else reason
        self._text.append(text)
        parts = () if self.parser is None else self._parts(self.parser, text, is_text)
        finish = None if self.finish_reason is None else self.finish
        return Piece(self.index, text, parts, (event,) if token >= 0 else (), finish)

    def _count(self, token: int, at: float) -> None:
        self.sampled.append(token)
        if self.latest is None:
            self.first = at
        else:
            self.intervals.append(at - self.latest)
        self.latest = at

    def _text_of(self, token: int) -> str:
        """The text that a token makes certain."""
        special = token in self._shown
        hidden = ""
        if self._stream.stops and not special:
            hidden = self._tokenizer.hidden_text(token)
        data = self._tokenizer.token_bytes(token, special=special)
        return self._stream.feed(data, hidden, search=len(self.sampled) > self.request.min_tokens)

    def _parts(self, parser: ReplyParser, text: str, is_text: bool) -> tuple[Part, ...]:
        """The parts in more text; a token that ``is_text`` may count as one of the reasoning. The
        one call that an answer may make ends it."""
        before = parser.thinking
        parts = parser.feed(text)
        self.reasoning_tokens += is_text and (before or parser.thinking)
        complete = parser.complete
        if self.finish_reason is not None:
            from harness.host.reply import joined

            parts = joined([*parts, *parser.finish()])
        if complete or (parser.calls and self.finish_reason is FinishReason.STOP):
            self._called, self.finish_reason = True, FinishReason.STOP
        return tuple(parts)

    def _check(self, event: TokenEvent) -> None:
        """Raise the error that ended the answer, if one did."""
        failure = failure_of(event)
        if failure is None:
            return
        self.finish_reason = event.finish_reason
        if self._masks is not None and event.finish_reason is FinishReason.ERROR:
            problem = self._masks.problem_after(self.sampled)
            if problem is not None:
                from harness.host.structured.grammars import GrammarBroke

                raise GrammarBroke(f"cannot be held to any longer: {problem}")
        raise failure


def failure_of(event: TokenEvent) -> ZincError | None:
    """The error that an event reports, if it does."""
    match event.finish_reason:
        case FinishReason.ERROR:
            return NonFiniteLogits(
                f"the logits at position {event.position} hold NaN or infinity; "
                "the model file is damaged or overflows binary32"
            )
        case FinishReason.CLIENT_TOO_SLOW:
            return ClientTooSlow("the client took no tokens for too long")
    return None


def joined_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """One piece for each answer, in the order of their first pieces."""
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
