"""What HTTP itself asks of a server: methods, paths with a slash, old clients, silence."""

from __future__ import annotations

import pytest

from harness.serve import streams
from harness.serve.keys import key_digest, new_key
from tests.serve.conftest import Serve
from tests.serve.http import Http
from tests.serve.test_connections import COMPLETIONS

KEY = new_key()
TENANTS = f'[tenant.alice]\nid = 1\nkeys = ["{key_digest(KEY)}"]\n'


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", COMPLETIONS, "POST"),
        ("DELETE", "/health", "GET, HEAD"),
        ("PUT", "/v1/models/tiny", "DELETE, GET, HEAD"),
    ],
)
def test_a_wrong_method_names_the_right_ones(
    http: Http, method: str, path: str, allowed: str
) -> None:
    reply = http.send(method, path, None, {})
    assert reply.status == 405
    assert reply.headers["Allow"] == allowed


def test_health_needs_no_key_however_it_is_written(serve: Serve, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The other routes do, with a slash too."""
    file = tmp_path / "tenants.toml"
    file.write_text(TENANTS)
    with serve(tenants=file) as server:
        http = Http(server.url)
        for path in ("/health", "/health/", "/health?full=1"):
            assert http.get(path).status == 200
        for path in ("/ready", "/ready/", "/v1/models/", "/health/x"):
            assert http.get(path).status == 401


def test_http_1_0_names_no_host(http: Http) -> None:
    """A page's request names one in every version, and HTTP/1.1 has to."""
    assert http.raw(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200")
    foreign = b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n"
    assert http.raw(foreign).startswith(b"HTTP/1.0 403")
    page = b"GET /health HTTP/1.0\r\nOrigin: http://evil.example\r\n\r\n"
    assert http.raw(page).startswith(b"HTTP/1.0 403")
    nameless = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    assert http.raw(nameless).startswith(b"HTTP/1.1 403")


def test_a_stream_that_says_something_has_no_comments(http: Http) -> None:
    """Neither while tokens come whose text is not certain yet."""
    biased = {"prompt": "a", "stream": True, "max_tokens": 40, "ignore_eos": True}
    for body in (biased, {**biased, "logit_bias": {"240": 100}}):
        answer = http.post(COMPLETIONS, body).body
        assert answer.endswith(b"data: [DONE]\n\n")
        assert all(line.startswith(b"data: ") for line in answer.split(b"\n") if line)


def test_silence_is_counted_from_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(streams.time, "monotonic", lambda: now)
    silence = streams.Silence()
    now = streams.PING_SECONDS - 1
    assert silence.broken_by(b"") == b""
    assert silence.broken_by(b"x") == b"x"
    now += streams.PING_SECONDS - 1
    assert silence.broken_by(b"") == b""
    now += 1
    assert silence.broken_by(b"") == streams.PING
    assert silence.broken_by(b"") == b""
