"""Turns the engine's events of a request into the text of its answer: for the server, the command
line and Python."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from contract.errors import NonFiniteLogits, ZincError
from contract.types import FinishReason, Request, TokenEvent
from reference.model.text_stream import TextStream
from reference.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from harness.host.reply import ReplyParser
    from harness.host.reply_parts import Part
    from harness.host.structured.grammars import TokenMasks

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that calls tools."""
NO_TOKENS: frozenset[int] = frozenset()


class ClientTooSlow(ZincError):
    """The engine ended a request because its events were not read for too many steps."""


class Piece(NamedTuple):
    """The next piece of answer number ``choice``: its text, the parts of that text, the events of
    its tokens, and the finish reason if it ended."""

    choice: int
    text: str
    parts: tuple[Part, ...] = ()
    events: tuple[TokenEvent, ...] = ()
    finish: str | None = None

    @property
    def token(self) -> int | None:
        """The last token of the piece; None if it is not part of the text."""
        last = self.events[-1] if self.events else None
        return None if last is None or last.finish_reason is FinishReason.STOP else last.token


class CancelsRequests(Protocol):
    """A stream of events whose requests can be ended."""

    def end(self, request_id: int, used: int) -> None:
        """End a request whose answer is complete with ``used`` tokens."""


class AnswerText:
    """The answer to ``request``, built from its events; ``index`` numbers it among the choices.

    ``finish_reason`` is None until it ends. ``first`` and ``latest`` are monotonic times of tokens
    in seconds, ``intervals`` the seconds between tokens."""

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
        """``parser`` divides the text into parts. ``shown``: control tokens whose text is part of
        the answer. ``stop_tokens``: tokens that end it and are not part of it. ``masks``: the
        grammar's masks, which explain an error. Raises RequestError for unsupported stop
        strings."""
        self.index = index
        self.request = request
        self.parser = parser
        self.sampled: list[int] = []
        """All tokens, including one that ended the answer and is not part of its text."""
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
        """As ``take``, and cancel the request on ``stream`` if the answer ends before the engine's
        last event."""
        piece = self.take(event, at)
        if piece is not None and piece.finish is not None and event.finish_reason is None:
            stream.end(event.request_id, len(self.sampled))
        return piece

    def take(self, event: TokenEvent, at: float = 0.0) -> Piece | None:
        """The piece for the next event; None after the end of the answer. ``at`` is the event's
        time in monotonic seconds. Raises NonFiniteLogits, ClientTooSlow, and GrammarBroke if no
        token can follow."""
        if self.finish_reason is not None:
            return None
        token, reason = event.token, event.finish_reason
        if reason is not None:
            self._check(event)
        if token >= 0:
            self.sampled.append(token)
            if self.latest is None:
                self.first = at
            else:
                self.intervals.append(at - self.latest)
            self.latest = at
            if token in self._stop_tokens and reason is not FinishReason.STOP:
                # The engine does not know these tokens; later tokens of the request are dropped.
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

    def _text_of(self, token: int) -> str:
        """The text that becomes certain with a token."""
        special, stream = token in self._shown, self._stream
        data = self._tokenizer.token_bytes(token, special=special)
        if not stream.stops:
            return stream.feed(data)
        hidden = "" if special else self._tokenizer.hidden_text(token)
        return stream.feed(data, hidden, search=len(self.sampled) > self.request.min_tokens)

    def _parts(self, parser: ReplyParser, text: str, is_text: bool) -> tuple[Part, ...]:
        """The parts of new text. A token that ``is_text`` counts as reasoning if it begins or ends
        in it. The answer ends after its only permitted call."""
        before = parser.thinking
        parts = parser.feed(text)
        self.reasoning_tokens += is_text and (before or parser.thinking)
        complete = parser.complete
        if self.finish_reason is not None:
            from harness.host.reply_parts import joined

            parts = joined([*parts, *parser.finish()])
        if complete or (parser.calls and self.finish_reason is FinishReason.STOP):
            self._called, self.finish_reason = True, FinishReason.STOP
        return tuple(parts)

    def _check(self, event: TokenEvent) -> None:
        """Raise the error that the event reports, if any."""
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
    """The error that an event reports; None if there is none."""
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
    """The pieces of each answer joined to one, in the order of their first pieces."""
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
