"""Answers as streams of server-sent events, and as whole JSON objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from contract.types import TokenEvent
from harness.host.answer_text import Piece
from harness.host.event_queue import TimedEvent
from harness.host.faults import log_fault
from harness.host.reply_parts import Part, joined
from harness.serve.answers import AnswerShape, Json
from harness.serve.caller import Caller, Gone
from harness.serve.data_lines import PING
from harness.serve.errors import ApiError, as_api_error, internal_error, renamed
from harness.serve.generation import Generation
from harness.serve.wsgi_task import LastPart

POLL_SECONDS = 0.5
"""Seconds between two checks whether the client is still connected."""
JOINED_PARTS = 64
"""Parts of a whole answer that are joined to one. To join all would copy the text each time."""
PING_SECONDS = 15.0
"""A stream that was silent for this long sends a comment, so that proxies keep the connection
open. Some clients cannot read comments, so there are no others."""


def event_stream(
    generation: Generation,
    shape: AnswerShape,
    usage: bool,
    finish: Callable[[ApiError | None], None],
    caller: Caller,
) -> Iterator[bytes]:
    """The body of a streamed answer, except for what ``caller`` sends from the engine's thread.
    ``finish`` is called once before the last line, with the error if the answer failed, or when the
    client disconnects."""
    ended = False
    silent = Silence(shape.ping)

    def end(error: ApiError | None) -> None:
        nonlocal ended
        if not ended:
            ended = True
            finish(error)

    def lines(events: Sequence[TimedEvent]) -> bytes:
        made = [x for piece in generation.received(events) for x in shape.lines(piece)]
        return silent.broken_by(b"".join(made))

    try:
        for events in generation.taken(POLL_SECONDS, partial(caller.send_at_once, lines)):
            data = lines(events)
            if not data and caller.gone():
                return
            if not data:
                caller.begin()
            yield data
        # Formats that do not name the receipt have one, too.
        _ = generation.receipt
        last = LastPart(shape.end(usage))
        end(None)
        yield last
    except Exception as error:
        refusal = as_api_error(error)
        if refusal is None:
            log_fault("a stream failed", error)
            refusal = internal_error()
        end(refusal)
        yield LastPart(shape.failed(renamed(refusal, caller.client_name)))
    finally:
        generation.cancel()
        end(CLIENT_LEFT)


class Silence:
    """Measures how long a stream has sent nothing."""

    def __init__(self, ping: bytes = PING) -> None:
        self._ping = ping
        self._since = time.monotonic()

    def broken_by(self, data: bytes) -> bytes:
        """``data``, or a comment if there is none and PING_SECONDS have passed."""
        now = time.monotonic()
        if not data and now - self._since >= PING_SECONDS:
            data = self._ping
        if data:
            self._since = now
        return data


CLIENT_LEFT = ApiError(499, "the client left", code="client_left")


def whole_answer(generation: Generation, shape: AnswerShape, gone: Gone) -> Json:
    """The answer of a request that is not streamed. Raises ApiError, also if the client
    disconnects.

    Cheap text is made on the engine's thread: waking this thread for every token would take the
    interpreter lock from the engine in every step."""
    answers = [_JoinedPieces() for _ in generation.choices]

    def add(events: Sequence[TimedEvent]) -> bool:
        if gone():
            return False
        for piece in generation.received(events):
            answers[piece.choice].add(piece)
        return True

    try:
        for events in generation.taken(POLL_SECONDS, add):
            if not add(events):
                raise CLIENT_LEFT
    finally:
        generation.cancel()
    _ = generation.receipt
    return shape.whole([[answer.piece(index)] for index, answer in enumerate(answers)])


class _JoinedPieces:
    """The pieces of one choice, joined to one. Objects kept for each token would make Python's
    collector look at all of them again and again."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._parts: list[Part] = []
        self._latest: list[Part] = []
        self._events: list[TokenEvent] = []
        self._finish: str | None = None

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        self._texts.append(piece.text)
        self._events += piece.events
        self._finish = piece.finish
        self._latest += piece.parts
        if len(self._latest) >= JOINED_PARTS:
            self._parts += joined(self._latest)
            self._latest = []

    def piece(self, choice: int) -> Piece:
        """All of them as one."""
        parts, events = (*self._parts, *joined(self._latest)), tuple(self._events)
        return Piece(choice, "".join(self._texts), parts, events, self._finish)
