"""Server-sent events: unnamed data lines and comments only, since OpenAI's client takes any named
event for a chunk, and an error line before closing, since it takes a cut stream for a whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from harness.serve.answers import AnswerFormat, Json
from harness.serve.caller import Gone, SendAtOnce
from harness.serve.choices import Piece
from harness.serve.data_lines import data_line
from harness.serve.errors import ApiError, as_api_error, internal_error
from harness.serve.faults import log_fault
from harness.serve.generation import Generation

PING_SECONDS = 0.5
"""After this long without anything to say a comment is sent: it keeps the connection alive, and
shows whether somebody is still there."""
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def event_stream(
    generation: Generation,
    shape: AnswerFormat,
    usage: bool,
    finish: Callable[[ApiError | None], None],
    send_at_once: SendAtOnce,
) -> Iterator[bytes]:
    """The body of a streamed answer, but for what ``send_at_once`` sends meanwhile. ``finish`` is
    called once, before the last line is sent, with the error that ended it if one did, or when the
    client leaves."""
    ended = False

    def end(error: ApiError | None) -> None:
        nonlocal ended
        if not ended:
            ended = True
            finish(error)

    def lines(pieces: Sequence[Piece]) -> bytes:
        return b"".join([line for piece in pieces for line in shape.lines(piece)]) or PING

    def tell(make: Callable[[], Sequence[Piece]]) -> bool:
        return send_at_once(lambda: lines(make()))

    try:
        for pieces in generation.pieces(PING_SECONDS, tell):
            yield lines(pieces)
        end(None)
        if usage:
            yield shape.last_line()
        yield DONE
    except Exception as error:
        told = as_api_error(error)
        if told is None:
            log_fault("a stream failed", error)
            told = internal_error()
        end(told)
        yield data_line(told.encoded())
    finally:
        generation.cancel()
        end(CLIENT_LEFT)


CLIENT_LEFT = ApiError(499, "the client left", code="client_left")


def whole_answer(generation: Generation, shape: AnswerFormat, gone: Gone) -> Json:
    """The answer of a request that is not streamed. Raises ApiError, also when the client left."""
    parts: list[list[Piece]] = [[] for _ in generation.choices]
    try:
        for pieces in generation.pieces(PING_SECONDS):
            if gone():
                raise CLIENT_LEFT
            for piece in pieces:
                parts[piece.choice].append(piece)
    finally:
        generation.cancel()
    return shape.whole(parts)
