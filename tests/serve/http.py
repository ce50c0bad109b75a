"""Plain HTTP requests, and raw bytes on a socket."""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.patience import PATIENCE_SECONDS

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def answer(self) -> dict[str, Any]:
        """The JSON value, after checking that it is not a refusal."""
        assert self.status == 200, self.body
        answer: dict[str, Any] = self.json
        return answer

    @property
    def error(self) -> dict[str, Any]:
        """The error, after checking that it has the one shape."""
        body = self.json
        assert list(body) == ["error"]
        assert list(body["error"]) == ["message", "type", "param", "code"]
        assert self.headers["Content-Type"] == "application/json"
        error: dict[str, Any] = body["error"]
        return error


class Http:
    """Requests to one server, each on a connection of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.address = (parts.hostname, parts.port)

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, None, headers)

    def post(self, path: str, body: object, **headers: str) -> Reply:
        return self.send("POST", path, json.dumps(body).encode(), {**JSON, **headers})

    def send(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(
            http.client.HTTPConnection(*self.address, timeout=PATIENCE_SECONDS)
        ) as connection:
            connection.request(method, path, body, named)
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())

    def raw(self, data: bytes, timeout: float = PATIENCE_SECONDS) -> bytes:
        """What comes back for ``data`` until the server closes, before it has read all perhaps."""
        answer = b""
        with self.connected(timeout) as connection, suppress(ConnectionError):
            with suppress(ConnectionError):
                connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        return answer

    @contextmanager
    def connected(self, timeout: float = PATIENCE_SECONDS) -> Iterator[socket.socket]:
        """A socket to the server."""
        with socket.create_connection(self.address, timeout=timeout) as connection:
            yield connection


def bearer(key: str) -> dict[str, str]:
    """The header of a tenant's key."""
    return {"Authorization": f"Bearer {key}"}


def posted(path: str, body: object) -> bytes:
    """The bytes of a request."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def slow_reader(http: Http) -> socket.socket:
    """A connection of which the kernel keeps next to nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.settimeout(PATIENCE_SECONDS)
    connection.connect(http.address)
    return connection


def closing_after(request: bytes) -> bytes:
    """A request after which the connection is closed."""
    return request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)


def unchunked(answer: bytes) -> bytes:
    """The body of an answer of parts."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            return body
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
