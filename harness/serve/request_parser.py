"""Reads requests as waitress does, and refuses more: what others may read differently, what takes
too long, and what there is no room for."""

from __future__ import annotations

import re

from waitress import receiver
from waitress.parser import HTTPRequestParser, ParsingError
from waitress.task import ErrorTask
from waitress.utilities import BadRequest, Error

from harness.serve.errors import ApiError

MAX_HEADER_BYTES = 32 << 10
CONTINUE = "100-continue"
"""The only expectation that HTTP has."""
ENCODINGS = re.compile(rb"^transfer-encoding:(.*)", re.IGNORECASE | re.MULTILINE)
BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")

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

    def parse_header(self, header_plus: bytes) -> None:
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
