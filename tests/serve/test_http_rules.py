"""What HTTP itself asks of a server: methods, paths with a slash, old clients, silence."""

import re
from types import SimpleNamespace

import pytest

from harness.serve import streams
from harness.serve.keys import key_digest, new_key
from harness.serve.routes import ROUTES
from tests.serve.http import JSON, Http
from tests.serve.tenants import write_tenants
from tests.serve.test_connections import COMPLETIONS
from tests.serve.test_hostile_connections import HEAD, status_of

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
def test_a_wrong_method_names_the_right_ones(http, method, path, allowed):
    reply = http.send(method, path, None, {})
    assert reply.status == 405
    assert reply.headers["Allow"] == allowed


def test_probes_need_no_key_however_they_are_written(serve, tmp_path):  # type: ignore[no-untyped-def]
    """The other routes do, with a slash too. Without a key a probe says no names."""
    file = tmp_path / "tenants.toml"
    file.write_text(TENANTS)
    with serve(tenants=file) as server:
        http = Http(server.url)
        for path, status in (("/health", "ok"), ("/ready", "ready")):
            for written in (path, f"{path}/", f"{path}?full=1"):
                assert http.get(written).answer == {"status": status}
        for path in ("/metrics", "/v1/models/", "/health/x", "/ready/x"):
            assert http.get(path).status == 401


def test_metrics_have_the_type_that_prometheus_reads(http):
    """A parameter that is there twice makes a type that Go's parser may refuse."""
    kind = http.get("/metrics").headers["Content-Type"]
    assert [part.strip() for part in kind.split(";")] == [
        "text/plain", "version=0.0.4", "charset=utf-8"]  # fmt: skip


def test_http_1_0_names_no_host(http):
    """A page's request names one in every version, and HTTP/1.1 has to."""
    assert http.raw(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200")
    foreign = b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n"
    assert http.raw(foreign).startswith(b"HTTP/1.0 403")
    page = b"GET /health HTTP/1.0\r\nOrigin: http://evil.example\r\n\r\n"
    assert http.raw(page).startswith(b"HTTP/1.0 403")
    nameless = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
    assert http.raw(nameless).startswith(b"HTTP/1.1 403")


def test_a_stream_that_says_something_has_no_comments(http):
    """Neither while tokens come whose text is not certain yet."""
    biased = {"prompt": "a", "stream": True, "max_tokens": 40, "ignore_eos": True}
    for body in (biased, {**biased, "logit_bias": {"240": 100}}):
        answer = http.post(COMPLETIONS, body).body
        assert answer.endswith(b"data: [DONE]\n\n")
        assert all(line.startswith(b"data: ") for line in answer.split(b"\n") if line)


def test_silence_is_counted_from_what_was_sent(monkeypatch):
    now = 0.0
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: now))
    silence = streams.Silence()
    now = streams.PING_SECONDS - 1
    assert silence.broken_by(b"") == b""
    assert silence.broken_by(b"x") == b"x"
    now += streams.PING_SECONDS - 1
    assert silence.broken_by(b"") == b""
    now += 1
    assert silence.broken_by(b"") == streams.PING
    assert silence.broken_by(b"") == b""


def test_pages_of_named_origins_may_ask(serve):
    """They may ask before, and read the answer; others are refused as ever."""
    friend, foreign = "https://chat.example.org", "https://evil.example"
    asks = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "x-api-key"}
    with serve(cors=(friend + "/",)) as server:
        http = Http(server.url)
        before = http.send("OPTIONS", COMPLETIONS, None, {"Origin": friend, **asks})
        assert before.status == 204
        assert before.headers["Access-Control-Allow-Origin"] == friend
        assert before.headers["Access-Control-Allow-Headers"] == "x-api-key"
        answer = http.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, Origin=friend)
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] == friend
        assert answer.headers["Vary"] == "Origin"
        for path in (COMPLETIONS, "/v1/models"):
            refused = http.send("OPTIONS", path, None, {"Origin": foreign, **asks})
            assert refused.error["code"] == "origin_not_allowed"
            assert "Access-Control-Allow-Origin" not in refused.headers
        assert http.send("OPTIONS", COMPLETIONS, None, {}).status == 405
    with serve(cors=("*",)) as server:
        answer = Http(server.url).get("/v1/models", Origin=foreign)
        assert answer.headers["Access-Control-Allow-Origin"] == foreign


def test_routes_are_there_without_their_version(http):
    """Those that clients ask, with the same answers and refusals."""
    asked = {"prompt": "a", "max_tokens": 2, "seed": 1}
    short, long = (http.post(path, asked).json for path in ("/completions", COMPLETIONS))
    assert short["choices"] == long["choices"]
    assert http.get("/models").json["data"] == http.get("/v1/models").json["data"]
    assert http.get("/models/tiny").json["id"] == "tiny"
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    assert http.post("/chat/completions", chat).status == 200
    message = {**chat, "model": "nobody"}
    assert http.post("/messages", message).json["type"] == "error"
    assert http.post("/messages", {**message, "model": "tiny"}).json["type"] == "message"
    assert http.get("/tenants").status == 404


def test_a_path_that_is_no_route_is_told_what_to_ask(http):
    """The route that was meant; for files and batches the command that answers them."""
    for path, says in (
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/embedding", "did you mean /v1/embeddings?"),
        ("/v1/files", "zinc-rt run-batch answers a file of requests"),
        ("/v1/batches/batch_1/cancel", "zinc-rt run-batch answers a file of requests"),
        ("/v1/images/generations", "GET /openapi.json lists the routes"),
        ("/" + "v1/chat/completions" * 400, "GET /openapi.json lists the routes"),
    ):
        reply = http.post(path, {})
        assert (reply.status, reply.error["code"]) == (404, "not_found")
        assert reply.error["message"].endswith(says)
        assert len(reply.body) < 500


THINGS = [
    route.path for route in ROUTES if route.method == "GET" and re.search("/<[^/]*>$", route.path)
]
"""The paths whose last part names one of several things."""


@pytest.mark.parametrize("item", THINGS)
def test_an_action_that_is_no_route_is_no_thing(http, item):
    """Its name is not taken for that of a thing, which could not be sent to."""
    action = re.sub("<[^/]*>$", "compact", item)
    for path in (action, f"{action}/", f"{action}?stream=true"):
        for method in ("POST", "PUT", "PATCH", "OPTIONS"):
            reply = http.send(method, path, b"{}", JSON)
            assert (reply.status, reply.error["code"]) == (404, "not_found"), (method, path)
            assert reply.error["message"].endswith("; GET /openapi.json lists the routes")
            assert "Allow" not in reply.headers
    misspelt = http.post("/responses/input_token", {})
    assert misspelt.error["message"].endswith("did you mean /v1/responses/input_tokens?")


def test_a_thing_names_its_methods(serve, tmp_path):
    """And a route is no thing, though it is at the place of one."""
    path = write_tenants(tmp_path, {"alice": KEY, "bob": new_key()})
    with serve(tenants=path, receipts=tmp_path / "receipts") as server:
        http = Http(server.url)
        key = {"Authorization": f"Bearer {KEY}"}
        asked = {"input": "a", "max_output_tokens": 1}
        stored = http.post("/v1/responses", asked, **key).answer["id"]
        for thing, allowed in (
            (f"/v1/responses/{stored}", "DELETE, GET, HEAD"),
            (f"/responses/{stored}", "DELETE, GET, HEAD"),
            (f"/v1/receipts/{stored}", "GET, HEAD"),
            ("/v1/models/tiny", "DELETE, GET, HEAD"),
            ("/v1/tenants/alice", "DELETE, GET, HEAD"),
            ("/v1/tenants/alice/usage", "GET, HEAD"),
            ("/v1/models/pull", "POST"),
            ("/slots/0", "POST"),
        ):
            reply = http.send("PUT", thing, b"{}", {**JSON, **key})
            assert (reply.status, reply.headers["Allow"]) == (405, allowed), thing
        assert http.send("PUT", "/v1/tenants/bob", b"{}", {**JSON, **key}).status == 404
        assert http.send("PUT", "/v1/tenants/alice", b"{}", JSON).status == 401


def test_an_answer_has_an_id(http):
    """The client's own where it is a plain word."""
    assert http.get("/health", X_Request_Id="a-1:b.c").headers["X-Request-Id"] == "a-1:b.c"
    for bad in ("", "a b", "x" * 200, "\xe4"):
        told = http.get("/nowhere", X_Request_Id=bad).headers
        assert told["X-Request-Id"].startswith("req_")
        assert told["Request-Id"] == told["X-Request-Id"]


def test_expectations_that_cannot_be_met(http):
    """The only one there is is met, unless its body is not wanted."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    post += b"Connection: close\r\n"
    sized = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    for member, begin in (
        (b"100-continue", b"HTTP/1.1 100"),
        (b"100-Continue, ", b"HTTP/1.1 100"),
        (b"", b"HTTP/1.1 200"),
        (b"200-ok", b"HTTP/1.1 417"),
        (b"100-continue, x=1", b"HTTP/1.1 417"),
    ):
        answer = http.raw(b"%bExpect: %b\r\n%b" % (post, member, sized))
        assert answer.startswith(begin), member
        assert answer.count(b"HTTP/1.1 ") == 1 + (b" 100 " in answer)
        assert (b'"code":"expectation_failed"' in answer) == (b" 417 " in answer)
    for bodyless in (b"GET /health HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\n"):
        head = bodyless + b"Host: localhost\r\nConnection: close\r\nContent-Length: 0\r\n"
        answer = http.raw(head + b"Expect: 100-continue\r\n\r\n")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert b"HTTP/1.1 100" not in answer
    large = b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n"
    assert http.raw(post + large).startswith(b"HTTP/1.1 413")
    assert http.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nExpect: x\r\n\r\n").startswith(
        b"HTTP/1.1 417"
    )


@pytest.mark.parametrize("value", ["close", "TE, close", "keep-alive ,Close", ",close"])
def test_a_connection_ends_by_any_of_its_options(http, value):
    """Perl's LWP names two. ``raw`` reads until the server closes."""
    asked = "GET /health HTTP/{}\r\nHost: localhost\r\nConnection: {}\r\n\r\n"
    for version in ("1.0", "1.1"):
        answer = http.raw(asked.format(version, value).encode())
        assert answer.startswith(f"HTTP/{version} 200".encode())
        assert b"\r\nconnection: close\r\n" in answer.lower()
    with http.connected() as connection:
        for _ in range(2):
            connection.sendall(asked.format("1.1", "keep-alive, x-close").encode())
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("body", [b"{}", b'{"id": 0}', b"[{}]", b"[[]]", b"null", b"7", b'"a"'])
def test_a_body_of_another_kind_is_refused_on_every_route(server, body):
    """A list where an object is due, and the other way round."""
    http = Http(server.url)
    for path, methods in http.get("/openapi.json").json["paths"].items():
        if "post" in methods and "{" not in path:
            reply = http.send("POST", path, body, JSON)
            assert reply.status < 500, (path, reply.body)


@pytest.mark.parametrize("path", ["/v1/completions", "/completions", "/v1/embeddings"])
@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"prompt": "a", "input": "a", "max_tokens": 2, "seed": 1, "made_up": 1}', JSON),
        (b'{"prompt": "a", "input": "a", "max_tokens": 2, "seed": 1, "stream": true}', JSON),
        (b'{"prompt": 1.5, "input": 1.5}', JSON),
        (b'{"prompt": "a", "input": "a", "model": "no such model"}', JSON),
        (b"{", JSON),
        (b"{}", {"Content-Type": "text/plain"}),
        (b"{}", {**JSON, "Content-Encoding": "gzip"}),
        (b"{}", {**JSON, "Host": "evil.example"}),
        (b"{}", {**JSON, "Origin": "http://evil.example"}),
        (b"{}", {**JSON, "X-Request-Id": "mine"}),
    ],
)
def test_a_route_answers_with_and_without_a_slash_alike(http, path, body, headers):
    own = ("date", "request-id", "x-request-id")
    told = []
    for asked in (path, f"{path}/"):
        reply = http.send("POST", asked, body, headers)
        named = {name.lower(): value for name, value in reply.headers.items()}
        assert named["request-id"] == named["x-request-id"]
        assert reply.headers["X-Request-Id"] == headers.get("X-Request-Id", named["request-id"])
        kept = {name: value for name, value in named.items() if name not in own}
        told.append((reply.status, kept, re.sub(rb'"(id|created)":("[^"]*"|\d+)', b"", reply.body)))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("line", "end"),
    [
        (b"zz", b"0\r\n\r\n"),
        (b"%x\n", b"0\r\n\r\n"),
        (b"%x;a=b\n", b"0\r\n\r\n"),
        (b"%x", b"0\n\r\n\r\n"),
        (b"%x", b"0;a\n\r\n\r\n"),
        (b"%x", b"0\r\nX: a\nY: b\r\n\r\n"),
        (b"%x", b"0\r\nX: a\n\nGET / HTTP/1.1\r\n\r\n"),
    ],
)
def test_a_chunk_that_is_no_chunk(http, line, end):
    """Nor one whose line ends in a bare line feed, for which a proxy may find other data."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    chunked = b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    sized = line % len(body) if b"%" in line else line
    sent = HEAD.encode() + chunked + sized + b"\r\n" + body + b"\r\n" + end
    assert status_of(http.raw(sent)) == b"400"
