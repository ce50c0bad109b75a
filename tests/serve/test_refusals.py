"""What is refused, how it is told, and that nothing else comes of it."""

import json
from socket import gethostname

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import DoesNotFit, QueueFull, TemplateError, TenantQueueFull
from harness.serve.errors import as_api_error
from harness.serve.strict_json import MAX_DEPTH, BadJson, loads
from tests.serve.conftest import wait_for_rest
from tests.serve.http import JSON

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
STOPS = list(range(32, 96))
"""Tokens of a random model that end an answer soon."""


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_minus_one_is_none(http, field):
    """As LM Studio's clients send it: the answer is that without the field and llama.cpp's -1."""
    paths = [(CHAT, {"messages": MESSAGES})]
    if field == "max_tokens":
        paths.append(("/v1/completions", {"prompt": "hello"}))
    for path, body in paths:
        same = [body | {"seed": 3, "stop_token_ids": STOPS} | more for more in (
            {field: -1}, {"n_predict": -1})]  # fmt: skip
        one, other = (http.post(path, each).answer for each in same)
        assert one["choices"] == other["choices"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[" * 100_000, "nested deeper"),
        (b"[" * (MAX_DEPTH + 2) + b"]" * (MAX_DEPTH + 2), "nested deeper"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"seed": 1, "seed": 2}', "'seed' twice"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": 1e999}', "too large"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b"\xff", "not UTF-8"),
        (b"", "not JSON"),
        (b"{} {}", "not JSON"),
    ],
)
def test_json_that_is_refused(http, body, says):
    reply = http.send("POST", CHAT, body, JSON)
    assert reply.status == 400
    assert reply.error["code"] == "invalid_json"
    assert says in reply.error["message"]


def test_more_than_there_may_be_is_refused(http):
    for path, body, param in (
        (CHAT, {"messages": MESSAGES, "stop": ["x"] * 1000}, "stop"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/completions", {"prompt": "a", "force_tokens": [5] * 300}, "force_tokens"),
    ):
        refused = http.post(path, body)
        assert (refused.status, refused.error["param"]) == (400, param)


def test_a_hundred_thousand_messages_are_refused(http):
    body = b'{"messages": [' + b",".join([b"{}"] * 100_000) + b"]}"
    assert http.send("POST", CHAT, body, JSON).error["param"] == "messages"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), inner
    ),
)  # fmt: skip


@given(JSON_VALUES)
def test_whatever_is_json_is_read_as_it_is(value):
    """With escapes, surrogate pairs among them, and without."""
    for ascii_only in (True, False):
        assert loads(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@settings(max_examples=300)
@given(st.binary(max_size=40))
def test_bytes_are_a_value_or_refused(body):
    try:
        value = loads(body)
    except BadJson:
        return
    assert json.loads(body) == value


def test_a_body_that_is_not_plain_json(http):
    """A page of another site can send text and forms, but not JSON. Its browser says that it is
    one; ``curl -d`` sends the type of a form, and none of a browser's headers."""
    body = json.dumps({"messages": MESSAGES, "max_tokens": 1}).encode()
    own = f"http://{http.address[0]}:{http.address[1]}"
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    browsers = (
        {"Origin": own},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Mode": "no-cors"},
        {"Referer": "https://evil.example/"},
        {"Cookie": "a=b"},
    )
    for headers in (
        {"Content-Type": "text/plain"},
        {"Content-Type": "multipart/form-data"},
        {**JSON, "Content-Encoding": "gzip"},
        *browsers,
        *({**form, **one} for one in browsers),
    ):
        assert http.send("POST", CHAT, body, headers).status == 415, headers
    accepted = ({}, JSON, form, {"Content-Type": ""}, {"Content-Type": "application/json; a=b"})
    for headers in accepted:
        assert http.send("POST", CHAT, body, headers).status == 200, headers


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "", "a@localhost", "::", "[x", "evil.localhost",
     "localhost.evil.example"],
)  # fmt: skip
def test_a_foreign_name_is_refused(http, host):
    """DNS rebinding: a page's own name that resolves to this machine."""
    for path in ("/health", "/v1/models"):
        reply = http.get(path, Host=host)
        assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host", ["localhost:1", "127.0.0.1", "LOCALHOST", "[::1]:8080", "10.1.2.3", gethostname()]
)
def test_addresses_and_own_names_are_not(http, host):
    assert http.get("/health", Host=host).status == 200


def test_pages_of_other_origins_are_refused(http):
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        assert http.get("/v1/models", Origin=origin).error["code"] == "origin_not_allowed"
    own = f"http://{http.address[0]}:{http.address[1]}"
    reply = http.get("/v1/models", Origin=own)
    assert reply.status == 200
    assert not [name for name in reply.headers if name.startswith("Access-Control")]


def test_headers_the_client_decides_by():
    """A full queue says when to come back; what cannot be mended by waiting says so."""
    full = as_api_error(QueueFull(4, 2.3))
    assert full is not None
    assert (full.status, full.headers) == (503, {"Retry-After": "3", "x-should-retry": "true"})
    for rate, code in ((False, "tenant_queue_full"), (True, "rate_limit_exceeded")):
        own = as_api_error(TenantQueueFull(4, 2.3, rate))
        assert own is not None
        assert (own.status, own.headers) == (429, full.headers)
        assert own.body["error"]["type"] == "rate_limit_error"
        assert own.body["error"]["code"] == code
    assert as_api_error(DoesNotFit("a", 1, 2, "b")) is None
    template = as_api_error(TemplateError("/secret/place.gguf: chat template: raised"))
    assert template is not None
    assert "secret" not in json.dumps(template.body)


def test_a_fault_of_ours_tells_nothing(server, http, monkeypatch, caplog):
    """Neither the client nor the log gets the message, which may hold a prompt."""

    def fail(*arguments: object) -> None:
        raise RuntimeError(str(arguments))

    monkeypatch.setattr(type(server.service.model), "encode_chat", fail)
    reply = http.post(CHAT, {"messages": [{"role": "user", "content": "SECRET"}]})
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert b"SECRET" not in reply.body
    assert "RuntimeError" in caplog.text
    assert "SECRET" not in caplog.text


def test_requests_are_logged_without_what_was_written(server, http, caplog):
    with caplog.at_level("INFO", "zinc_rt.serve"):
        message = {"role": "user", "content": "SECRET"}
        assert http.post(CHAT + "?q=SECRET", {"messages": [message], "max_tokens": 1}).status == 200
        http.get("/SECRET")
        wait_for_rest(server)
    assert CHAT in caplog.text
    assert "404" in caplog.text
    assert "SECRET" not in caplog.text
