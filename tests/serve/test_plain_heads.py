"""Heads of requests that are parsed without the library: as the library parses them."""

import random
from itertools import product
from typing import Any

import pytest
from waitress.adjustments import Adjustments
from waitress.utilities import find_double_newline

from harness.serve.request_parser import RequestParser

PLAIN = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 12\r\n\r\n"
STARTS = (b"POST /v1/completions", b"GET /", b"GET /v1/models/a~b-c_d.e", b"DELETE /v1//x/")
CONNECTIONS = (
    b"", b"Connection: close\r\n", b"connection: CLOSE\r\n", b"Connection:Keep-Alive\r\n",
)  # fmt: skip
LENGTHS = (b"", b"Content-Length: 0\r\n", b"CONTENT-LENGTH:  0012\t\r\n")
OTHERS = (b"", b'A-b: x\r\nA-B:\r\nAccept: */*, a="b c"\r\n', b"X-Forwarded-For: 10.0.0.1\r\n")
CHANGES = (
    (b"/v1", b"/v1?a=1"),
    (b"/v1", b"/%761"),
    (b"/v1", b"//v1"),
    (b"1.1", b"1.0"),
    (b"POST /", b"POST http://localhost/"),
    (b"POST", b"post"),
    (b"localhost", b"local\r\n host"),
    (b"localhost", "\u00e9".encode("latin-1")),
    (b"localhost", b"a\rb"),
    (b"localhost", b"a\nb"),
    (b"\r\n", b"\n"),
    (b"Content-", b"Content_"),
    (b"12", b""),
    (b"12", b"+12"),
    (b"12", b"12, 12"),
    (b"12", b"12\r\nContent-Length: 12"),
    (b"12", b"9" * 40),
    (b"Content-Length: 12", b"Transfer-Encoding: chunked"),
    (b"Host", b"Expect: 100-continue\r\nHost"),
    (b"Host", b"Connection: close, te\r\nHost"),
    (b"Host:", b"Host :"),
)
NOT_PLAIN = tuple(PLAIN.replace(*change) for change in CHANGES)


def facts(head: bytes, plain: bool) -> dict[str, Any]:
    """All that is known of a head, or the error of one that is refused."""
    with pytest.MonkeyPatch.context() as patch:
        if not plain:
            patch.setattr(RequestParser, "_parse_plain", lambda parser, head: False)
        parser = RequestParser(ADJUSTMENTS)
        consumed = parser.received(head)
    known = {**vars(parser), "consumed": consumed}
    error, body = known.pop("error", None), known.pop("body_rcv", None)
    known["error"] = None if error is None else (type(error), error.body)
    known["body"] = None if body is None else (type(body), getattr(body, "remain", None))
    names = ("connection_close", "expect_continue", "content_length", "chunked", "version")
    return known | {name: getattr(parser, name) for name in names}


ADJUSTMENTS = Adjustments()


def is_plain(head: bytes) -> bool:
    return RequestParser(ADJUSTMENTS)._parse_plain(head)


@pytest.mark.parametrize("start", STARTS)
def test_a_plain_head_is_parsed_as_by_the_library(start):
    for connection, length, others in product(CONNECTIONS, LENGTHS, OTHERS):
        head = start + b" HTTP/1.1\r\nHost: x\r\n" + connection + others + length + b"\r\n"
        assert is_plain(head)
        assert facts(head, plain=True) == facts(head, plain=False)


@pytest.mark.parametrize("head", NOT_PLAIN)
def test_any_other_head_is_left_to_the_library(head):
    assert not is_plain(head)
    assert facts(head, plain=True) == facts(head, plain=False)


def test_damaged_heads_are_parsed_alike():
    """Bytes changed, doubled and left out anywhere: whichever way parses them says the same."""
    draw, plain = random.Random(7), 0
    for _ in range(3000):
        head = bytearray(draw.choice((PLAIN, *NOT_PLAIN)))
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(head))
            head[at : at + draw.randint(0, 1)] = draw.choice(
                (b"", b"\r", b"\n", b" ", b"\t", b":", b"_", b"0", b",", b"%", b"\x85", b"\x00")
            )
        head += b"\r\n\r\n"
        plain += is_plain(bytes(head[: find_double_newline(head)]).lstrip())
        assert facts(bytes(head), plain=True) == facts(bytes(head), plain=False)
    assert plain > 30
