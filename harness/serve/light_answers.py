"""Requests and answers lighter than Flask's, for the routes that generate."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import msgspec
from flask import Request, Response
from werkzeug.datastructures import Headers
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.routing import Rule
from werkzeug.utils import get_content_type

from harness.serve.gate import check_body
from harness.serve.openapi import Route
from harness.serve.server_models import Lease

STREAM_HEADERS = (("Cache-Control", "no-store"), ("X-Accel-Buffering", "no"))


class LightRequest:
    """What the checks of a request read, as ``flask.Request`` has it."""

    def __init__(self, environ: dict[str, Any], url_rule: Rule, max_content_length: int) -> None:
        self.environ = environ
        self.method: str = environ["REQUEST_METHOD"]
        self.path: str = environ["PATH_INFO"]
        self.url_rule = url_rule
        self.max_content_length = max_content_length


class LightContext:
    """Facts about a request, as ``flask.g`` has them."""

    request_id: str

    def get(self, name: str) -> Any:
        """A fact, or None."""
        return vars(self).get(name)

    def pop(self, name: str, default: Any = None) -> Any:
        """Remove a fact and return it."""
        return vars(self).pop(name, default)


class LightAnswer:
    """An answer with status 200, lighter than Flask's ``Response``. Not for routes that answer
    HEAD. It has none of the headers that every answer gets."""

    status_code = 200

    def __init__(
        self, body: Iterable[bytes], kind: str, *headers: tuple[str, str], is_streamed: bool = False
    ) -> None:
        self.headers: list[tuple[str, str]] = [("Content-Type", kind), *headers]
        self.is_streamed = is_streamed
        self._body = body

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", self.headers)
        return self._body


def whole_answer(body: bytes, kind: str) -> LightAnswer:
    """An answer of which all bytes are known."""
    return LightAnswer([body], kind, ("Content-Length", str(len(body))))


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


def as_answer(answered: Any, route: Route, here: Any) -> Response | LightAnswer:
    """What the function of a route returned, as an answer."""
    posted = route.method == "POST"
    if isinstance(answered, Response):
        return answered
    if isinstance(answered, dict | list):
        answered = msgspec.json.encode(answered)
        if posted:
            return whole_answer(answered, "application/json")
        return Response(answered, mimetype="application/json")
    if isinstance(answered, bytes):
        return Response(answered, mimetype=route.produces)
    # Streams outlive the request that Flask knows of.
    body, kind = StreamBody(answered, here.pop("lease")), route.streams
    if posted:
        kind = get_content_type(kind, "utf-8")
        return LightAnswer(body, kind, *STREAM_HEADERS, is_streamed=True)
    headers = Headers(STREAM_HEADERS)
    return Response(body, mimetype=kind, headers=headers, direct_passthrough=True)


def body_of(incoming: Request) -> bytes:
    """The JSON body of a request. Raises ApiError and RequestEntityTooLarge."""
    check_body(incoming.environ)
    limit = incoming.max_content_length
    if limit is None or not incoming.environ.get("wsgi.input_terminated"):
        return incoming.get_data(cache=False)
    # It has arrived: the server in front reads it before it calls.
    raw: bytes = incoming.environ["wsgi.input"].read(limit + 1)
    if len(raw) > limit:
        raise RequestEntityTooLarge
    return raw
