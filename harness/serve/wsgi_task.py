"""Runs the application for one request and writes its answer to the connection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from typing import Any

from waitress.channel import ClientDisconnected
from waitress.parser import HTTPRequestParser
from waitress.proxy_headers import PROXY_HEADERS
from waitress.task import WSGITask, hop_by_hop, rename_headers
from waitress.utilities import build_http_date

from harness.serve.caller import CALLER, Caller

LENGTH = "Content-Length"
BODILESS = ("1", "204", "304")
"""The beginnings of a status without a body."""
LAST_CHUNK = b"0\r\n\r\n"


class LastPart(bytes):
    """The last part of a body, which is sent together with the mark of the end."""


class ResponseTask(WSGITask):  # type: ignore[misc]
    """Waitress's task for an application that answers with bytes alone. Its head takes a quarter of
    the time, and it sends each part in one piece, from any thread."""

    wrote_header: bool
    has_body = True
    """Whether an answer of this status has a body."""
    _ended = False

    def __init__(self, channel: Any, request: HTTPRequestParser) -> None:
        super().__init__(channel, request)
        self._lines: list[str] = []

    def get_environment(self) -> dict[str, Any]:
        """What the application reads of WSGI's environment, without headers that only a trusted
        proxy may send. The library writes a body to a file in memory and looks at every header
        twice."""
        request, path, channel = self.request, self.request.path, self.channel
        environ: dict[str, Any] = {
            "REQUEST_METHOD": request.command.upper(),
            "SERVER_PROTOCOL": f"HTTP/{self.version}",
            "PATH_INFO": "/" + path.lstrip("/") if path.startswith("//") else path,
            "QUERY_STRING": request.query,
            "wsgi.input": _body_of(request),
            CALLER: Caller(channel.check_client_disconnected, self._begin, self._send_at_once),
        }
        for key, value in request.headers.items():
            name = _environment_name(key)
            if name is not None:
                environ[name] = value
        return environ

    def execute(self) -> None:
        parts = self.channel.server.application(self.get_environment(), self._start)
        try:
            for part in parts:
                if part:
                    self.write(part)
            length = self.content_length
            if length not in (None, self.content_bytes_written) and self.request.command != "HEAD":
                # The client must not wait for bytes that do not come.
                self.close_on_finish = True
        finally:
            if hasattr(parts, "close"):
                parts.close()

    def _start(self, status: str, headers: Iterable[tuple[str, str]], *_: object) -> None:
        """WSGI's ``start_response``. Raises ValueError for headers that HTTP forbids."""
        self.status, self.complete = status, True
        self.has_body, lines = not status.startswith(BODILESS), self._lines
        for name, value in headers:
            written = _written(name)
            if "\n" in value or "\r" in value:
                raise ValueError(f"the header {name!r} has a line break")
            if written == LENGTH:
                self.content_length = int(value)
                if not self.has_body:
                    continue
            lines.append(f"{written}: {value}")

    def build_response_header(self) -> bytes:
        """The head of the answer. Without a length the connection ends with the answer."""
        connection, body = self.request.headers.get("CONNECTION", "").lower(), self.has_body
        lines = [f"HTTP/{self.version} {self.status}", *self._lines]
        sized = body and self.content_length is not None
        if self.version == "1.0":
            stays = sized and connection == "keep-alive"
            if stays:
                lines.append("Connection: Keep-Alive")
        else:
            stays = sized and connection != "close"
            if body and not sized:
                self.chunked_response = True
                lines.append("Transfer-Encoding: chunked")
        if not stays or self.close_on_finish:
            self.close_on_finish = True
            lines.append("Connection: close")
        lines += _date_line(int(self.start_time)), "", ""
        return "\r\n".join(lines).encode("latin-1")

    def write(self, data: bytes) -> None:
        """Send a part of the body, the first one together with the head: a send costs as much as
        making a token's line."""
        if not (data and self.complete and self.has_body):
            super().write(data)
            return
        head = b""
        if not self.wrote_header:
            head, self.wrote_header = self.build_response_header(), True
        if self.chunked_response:
            self._ended = type(data) is LastPart
            data = _framed(data) + LAST_CHUNK if self._ended else _framed(data)
        elif self.content_length is not None:
            data = data[: self.content_length - self.content_bytes_written]
            self.content_bytes_written += len(data)
        self.channel.write_soon(head + data if head else data)

    def finish(self) -> None:
        """Send the head if there is no body, and the mark of the end."""
        if not self._ended:
            super().finish()

    def _begin(self) -> None:
        """See ``Caller.begin``."""
        if self.complete and not self.wrote_header:
            # Whoever has left is noticed with the first bytes of the body.
            with suppress(ClientDisconnected):
                self.write(b"")

    def _send_at_once(self, make: Callable[..., bytes], *given: Any) -> bool:
        """See ``SendAtOnce``."""
        if not (self.wrote_header and self.chunked_response):
            return False
        sent: bool = self.channel.send_at_once(_made_chunk, make, given)
        return sent


def _body_of(request: HTTPRequestParser) -> BytesIO | Any:
    """The body of a request, to be read."""
    if request.body_rcv is None:
        return BytesIO()
    buffer = request.body_rcv.getbuf()
    return BytesIO(buffer.strbuf) if buffer.buf is None else buffer.getfile()


@lru_cache(maxsize=256)
def _environment_name(key: str) -> str | None:
    """The name of a request's header in WSGI's environment; None for headers of proxies."""
    return None if key in PROXY_HEADERS else rename_headers.get(key, f"HTTP_{key}")


@lru_cache(maxsize=256)
def _written(name: str) -> str:
    """A header's name as HTTP writes it: ``Content-Type``. Raises ValueError for one that an
    application may not send."""
    if "\n" in name or "\r" in name:
        raise ValueError(f"the header {name!r} has a line break")
    if name.lower() in hop_by_hop:
        raise ValueError(f"the header {name!r} is the server's own")
    return "-".join([part.capitalize() for part in name.split("-")])


@lru_cache(maxsize=2)
def _date_line(second: int) -> str:
    return f"Date: {build_http_date(second)}"


def _made_chunk(make: Callable[..., bytes], given: tuple[Any, ...]) -> bytes:
    data = make(*given)
    return b"%X\r\n%b\r\n" % (len(data), data) if data else b""


def _framed(data: bytes) -> bytes:
    """A chunk of a chunked body. No bytes for no data, since an empty chunk would end the body."""
    return b"" if not data else b"%X\r\n%b\r\n" % (len(data), data)
