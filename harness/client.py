"""A small client for servers that speak OpenAI's routes: JSON answers, and streams of events."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from contract.errors import ConfigError, ZincError

DONE = "[DONE]"
MAX_ANSWER_BYTES = 64 << 20
MAX_LINE_BYTES = 8 << 20
MAX_SHOWN_CHARS = 400
"""Characters of an answer that is no JSON which an error repeats."""


class ServerError(ZincError):
    """A server that refused, failed or cannot be reached. ``status`` is its HTTP status, None when
    there was none; ``code`` what the server calls the error."""

    exit_code = 1

    def __init__(self, problem: str, status: int | None = None, code: str | None = None) -> None:
        self.status = status
        self.code = code
        super().__init__(problem)


@dataclass(frozen=True)
class ServerClient:
    """Requests to the server at ``url``, each on a connection of its own; ``seconds`` is how long
    the server may be silent. Raises ConfigError for what is not an http URL."""

    url: str
    key: str | None = field(default=None, repr=False)
    seconds: float = 120.0

    def __post_init__(self) -> None:
        try:
            parts = self._url_parts
            host = (parts.hostname or "").encode("idna")
            usable = parts.scheme in ("http", "https") and host and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(f"{self.url!r} is not the address of a server: http://HOST:PORT")

    def get(self, path: str) -> Any:
        """The JSON at a path. Raises ServerError."""
        with closing(self._connection()) as connection:
            return self._json(self._request(connection, "GET", path, None))

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The objects of a stream as they come; leaving the iteration closes the connection, by
        which the server sees that nobody listens. Raises ServerError, also for a stream that is
        cut."""
        with closing(self._connection()) as connection:
            response = self._request(connection, "POST", path, {**body, "stream": True})
            for data in data_lines(self._chunks(response)):
                if data == DONE:
                    return
                event = _decoded(data)
                if isinstance(event, dict) and "error" in event:
                    raise _refusal(event, None)
                yield event
        raise ServerError(f"{self.url} cut its answer")

    @property
    def _url_parts(self) -> SplitResult:
        return urlsplit(self.url)

    def _connection(self) -> http.client.HTTPConnection:
        parts = self._url_parts
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert parts.hostname is not None
        return kind(parts.hostname, parts.port, timeout=self.seconds)

    def _request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        content = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._url_parts.path.rstrip("/") + path, content, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        if response.status >= 400:
            raise _refusal(self._json(response), response.status)
        return response

    def _json(self, response: http.client.HTTPResponse) -> Any:
        return _decoded(b"".join(self._chunks(response)).decode(errors="replace"))

    def _chunks(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """The bytes of a body, as they come."""
        try:
            while chunk := response.read1(1 << 16):
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> ServerError:
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
        return ServerError(f"{self.url}: {reason}; is a server there? see zinc-rt ps")


def data_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the contents of the ``data`` lines of server-sent events; other lines are comments that
    keep a connection alive. Raises ServerError for a line without end."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ServerError("the server sends lines without end")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")


def _decoded(text: str) -> Any:
    try:
        return json.loads(text[: MAX_ANSWER_BYTES + 1])
    except ValueError:
        raise ServerError(f"the server answers no JSON: {text[:MAX_SHOWN_CHARS]!r}") from None


def _refusal(body: Any, status: int | None) -> ServerError:
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return ServerError(f"the server answered {status}", status)
    return ServerError(str(error.get("message")), status, error.get("code"))
