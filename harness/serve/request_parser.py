"""Reads requests as waitress does, and refuses more: what others may read differently, what takes
too long, and what there is no room for."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from waitress import receiver
from waitress.buffers import OverflowableBuffer
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.receiver import FixedStreamReceiver
from waitress.task import ErrorTask
from waitress.utilities import BadRequest, Error

from harness.serve.errors import ApiError

MAX_HEADER_BYTES = 32 << 10
CONTINUE = "100-continue"
"""The only expectation that HTTP has."""
ENCODINGS = re.compile(rb"^transfer-encoding:(.*)", re.IGNORECASE | re.MULTILINE)
BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
PLAIN_HEAD = re.compile(
    rb"([A-Z]{1,16}) (/(?:[\w.~-][\w.~/-]*)?) HTTP/1\.1\r\n"
    rb"((?:[A-Za-z0-9-]+:[\t\x20-\x7e]*\r\n)+)\r\n",
    re.ASCII,
)
"""A head as almost all are: no query, nothing escaped, no folded lines, printable ASCII."""
PLAIN_LINE = re.compile(rb"([^:]+):[\t ]*([^\r]*)\r\n")
MAX_PLAIN_LENGTH = 15
"""Most digits of a plain head's length."""
USUAL = ("", "close", "keep-alive")
"""Values of the Connection header that need no closer look."""
CLOSER_LOOK = frozenset(("TRANSFER_ENCODING", "EXPECT"))

# The ``$`` of the library's patterns matches before a line feed, too, and where a line of a chunk
# ends there for a proxy, its data begin elsewhere.
for _name in ("ONLY_HEXDIG_RE", "CHUNK_EXT_RE"):
    _pattern = getattr(receiver, _name).pattern
    setattr(receiver, _name, re.compile(_pattern.removesuffix(b"$") + rb"\Z"))


class RefusalTask(ErrorTask):  # type: ignore[misc]
    """An error response that waitress itself decides on, in the form of all errors."""

    def execute(self) -> None:
        error = self.request.error
        message = f"{error.reason}: {getattr(error, 'problem', 'the request cannot be read')}"
        refusal = ApiError(error.code, message, code=error.reason.lower().replace(" ", "_"))
        body = refusal.encoded()
        self.status = f"{error.code} {error.reason}"
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


class RequestParser(HTTPRequestParser):  # type: ignore[misc]
    """Refuses requests whose body a proxy may delimit differently, and unknown expectations.
    Accepts ``close`` among several options of the Connection header."""

    body_rcv: Any

    def parse_header(self, header_plus: bytes) -> None:
        if self._parse_plain(header_plus):
            return
        try:
            super().parse_header(header_plus)
        except ValueError as error:
            # A malformed address, or a length of thousands of digits.
            raise ParsingError("the request's head cannot be read") from error
        encodings = [one.strip() for one in ENCODINGS.findall(header_plus)]
        sound = encodings == [b"chunked"] and self.chunked and "CONTENT_LENGTH" not in self.headers
        if encodings and not sound:
            raise ParsingError("Transfer-Encoding with a length, or not chunked once in HTTP/1.1")
        options = self.headers.get("CONNECTION", "").lower().split(",")
        if "close" in map(str.strip, options):
            self.headers["CONNECTION"], self.connection_close = "close", True
        expected = self.headers.get("EXPECT", "").lower().split(",")
        members = set(map(str.strip, expected)) - {""}
        has_body = self.body_rcv is not None
        self.expect_continue = has_body and members == {CONTINUE} and self.version == "1.1"
        if members - {CONTINUE}:
            self.error = Unmet("")

    def _parse_plain(self, head: bytes) -> bool:
        """Parse a plain head as the library would, in a quarter of its calls. False, with nothing
        done, for any other, and for one whose body or connection needs a closer look."""
        plain = PLAIN_HEAD.fullmatch(head)
        if plain is None:
            return False
        headers: dict[str, str] = {}
        for name, value in PLAIN_LINE.findall(plain[3]):
            key, text = _key(name), value.rstrip(b" \t").decode("ascii")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        length = headers.get("CONTENT_LENGTH", "0")
        connection = headers.get("CONNECTION", "").lower()
        usual = length.isdigit() and len(length) <= MAX_PLAIN_LENGTH
        if not (usual and connection in USUAL) or not CLOSER_LOOK.isdisjoint(headers):
            return False
        self.first_line, _, _ = head.partition(b"\r\n")
        self.headers, self.version = headers, "1.1"
        self.command = plain[1].decode("ascii")
        self.request_uri = self.path = plain[2].decode("ascii")
        self.proxy_scheme = self.proxy_netloc = self.query = self.fragment = ""
        self.url_scheme = self.adj.url_scheme
        self.connection_close = connection == "close"
        if connection == "close":
            headers["CONNECTION"] = connection
        self.expect_continue, self.content_length = False, int(length)
        if self.content_length:
            buffer = OverflowableBuffer(self.adj.inbuf_overflow)
            self.body_rcv = FixedStreamReceiver(self.content_length, buffer)
        return True

    def received(self, data: bytes) -> int:
        consumed: int = super().received(data)
        body = self.body_rcv
        if self.chunked:
            between = len(body.control_line) + len(body.trailer)
            if between > MAX_HEADER_BYTES or BARE_LINE_FEED.search(body.trailer):
                self.error = BadRequest("lines between or behind chunks")
        if self.error is not None:
            self.completed, self.expect_continue = True, False
        return consumed


@lru_cache(maxsize=256)
def _key(name: bytes) -> str:
    """The library's key of a header."""
    return name.upper().replace(b"-", b"_").decode("ascii")


class Unmet(Error):  # type: ignore[misc]
    """Waitress's error for an expectation other than 100-continue."""

    code = 417
    reason = "Expectation Failed"
    problem = f"only {CONTINUE} can be expected"


class TooSlow(Error):  # type: ignore[misc]
    """Waitress's error for a request that did not arrive in time."""

    code = 408
    reason = "Request Timeout"


class NoRoom(Error):  # type: ignore[misc]
    """Waitress's error for a large body beside many others."""

    code = 503
    reason = "Service Unavailable"
    problem = "too many large requests arrive at once; try again"
