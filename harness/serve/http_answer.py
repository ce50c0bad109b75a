"""Answers as the HTTP server sends them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from harness.serve.http_request import HttpRequest
from harness.serve.route import Route
from harness.serve.server_models import Lease

JSON_TYPE = "application/json"
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
PHRASES = {status.value: status.phrase for status in HTTPStatus}


class StreamBody:
    """The body of a stream. It holds ``lease`` until it is closed."""

    def __init__(self, parts: Iterator[bytes], lease: Lease) -> None:
        self._parts = parts
        self._lease = lease

    def __iter__(self) -> Iterator[bytes]:
        return self._parts

    def close(self) -> None:
        """Ends it, whether or not all of it was taken."""
        try:
            if isinstance(self._parts, Generator):
                self._parts.close()
        finally:
            self._lease.release()


class HttpAnswer:
    """An answer, which is a WSGI application. ``body``: all its bytes, or a stream of them.
    ``kind``: its content type, "" for none."""

    def __init__(
        self,
        body: bytes | StreamBody,
        kind: str = JSON_TYPE,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status, self.body = status, body
        self.headers: dict[str, str] = {}
        if kind.startswith("text/") and "charset" not in kind:
            kind += "; charset=utf-8"
        if kind:
            self.headers["Content-Type"] = kind
        if isinstance(body, bytes):
            self.headers["Content-Length"] = str(len(body))
        self.headers |= headers or {}

    @property
    def is_streamed(self) -> bool:
        """Whether its length is not known."""
        return isinstance(self.body, StreamBody)

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        phrase = PHRASES.get(self.status, "Unknown")
        start_response(f"{self.status} {phrase}", [*self.headers.items()])
        if environ["REQUEST_METHOD"] == "HEAD":
            return ()
        return [self.body] if isinstance(self.body, bytes) else self.body


def as_answer(answered: Any, route: Route, incoming: HttpRequest) -> HttpAnswer:
    """What the function of a route returned, as an answer."""
    if isinstance(answered, HttpAnswer):
        return answered
    if isinstance(answered, dict | list):
        return HttpAnswer(msgspec.json.encode(answered))
    if isinstance(answered, bytes):
        return HttpAnswer(answered, route.produces)
    # The lease stays with the stream, which outlives the call of the application.
    lease, incoming.lease = incoming.lease, None
    assert lease is not None
    return HttpAnswer(StreamBody(answered, lease), route.streams, headers=STREAM_HEADERS)
