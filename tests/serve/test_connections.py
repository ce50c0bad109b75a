"""Clients that send slowly, read slowly, or leave."""

import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from contract.types import LOCAL_TENANT, FinishReason
from harness.serve import listen, streams
from harness.serve.data_lines import PING
from harness.serve.run import Running
from tests.held_steps import hold_steps
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.serve.http import Http, posted

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "abc", "max_tokens": 250, "ignore_eos": True, "seed": 5}
SILENT = 319
"""A token without text."""


def running(server: Running) -> int:
    return server.service.model.driver.call(lambda engine: engine.statistics.running)


def ended(server: Running) -> dict[FinishReason, int]:
    """How many requests ended, by the reason."""
    return server.service.model.driver.call(lambda engine: engine.usage.of(0).requests_finished)


def heard_until(connection: socket.socket, mark: bytes, times: int = 1) -> bytes:
    """What arrives until ``mark`` has so often."""
    heard = b""
    while heard.count(mark) < times:
        part = connection.recv(65536)
        assert part
        heard += part
    return heard


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(
    server, http, monkeypatch, cancellations, stream, held
):
    """Its slot is free when the engine has made at most one step after the server cancelled.

    With and without tokens that come after the client left, but never the last one."""
    steps = hold_steps(monkeypatch, 5)
    before = server.service.ledger.total(LOCAL_TENANT)
    with http.connected() as connection:
        connection.sendall(posted(COMPLETIONS, {**LONG, "stream": stream}))
        wait_until(lambda: running(server) == 1)
        if stream:
            heard_until(connection, b"\n\n")
        assert not cancellations.posted_at
    steps.allow(0 if held else 200)
    wait_until(lambda: bool(cancellations.after))
    freed = cancellations.after[0]
    assert freed.running == 0
    assert freed.steps - cancellations.posted_at[0] <= 1
    wait_until(lambda: server.service.ledger.total(LOCAL_TENANT).abandoned == before.abandoned + 1)
    after = server.service.ledger.total(LOCAL_TENANT)
    assert (after.requests, after.rejected) == (before.requests + 1, before.rejected)


def test_one_who_leaves_while_waiting_is_forgotten(serve, monkeypatch):
    hold_steps(monkeypatch, 5)
    with serve(slots=1) as server:
        http = Http(server.url)
        driver = server.service.model.driver
        with http.connected() as first, http.connected() as second:
            first.sendall(posted(COMPLETIONS, LONG))
            wait_until(lambda: running(server) == 1)
            second.sendall(posted(COMPLETIONS, {**LONG, "stream": True}))
            wait_until(lambda: driver.call(lambda e: e.statistics.waiting) == 1)
            second.close()
            wait_until(lambda: driver.call(lambda e: e.statistics.waiting) == 0)
            assert running(server) == 1


def test_who_waits_hears_that_the_server_lives(serve, monkeypatch):
    """Comments come while there is nothing to say for long."""
    assert 10 <= streams.PING_SECONDS <= 30
    monkeypatch.setattr(streams, "PING_SECONDS", 0.5)
    hold_steps(monkeypatch, 5)
    with serve(slots=1) as server:
        http = Http(server.url)
        with http.connected() as first, http.connected() as second:
            first.sendall(posted(COMPLETIONS, {**LONG, "stream": True}))
            wait_until(lambda: running(server) == 1)
            second.sendall(posted(COMPLETIONS, {**LONG, "stream": True}))
            heard = heard_until(second, PING, 2)
            assert heard.startswith(b"HTTP/1.1 200 OK")
            assert b"\ndata:" not in heard


def test_events_are_never_named(http):
    """Nothing but data lines and comments, and the last one is [DONE]."""
    answer = http.post(COMPLETIONS, {**LONG, "stream": True, "max_tokens": 8}).body
    lines = [line for line in answer.split(b"\n") if line]
    assert all(line.startswith((b"data: ", b":")) for line in lines)
    assert lines[-1] == b"data: [DONE]"


TURNS = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(("path", "body", "name", "error"), [
    (COMPLETIONS, LONG, None, ("code", "engine_stopped")),
    ("/v1/messages", {**TURNS, "max_tokens": 200}, b"event: error", ("type", "overloaded_error")),
    ("/api/chat", {**TURNS, "options": {"num_predict": 200, "temperature": 0}}, None, None),
])  # fmt: skip
def test_a_stream_that_fails_says_so_before_it_closes(
    serve, monkeypatch, patient_end, path, body, name, error
):
    """In the form of each API: the last line, and no end of an answer."""
    hold_steps(monkeypatch, 5)
    with serve() as server, Http(server.url).connected() as connection:
        connection.sendall(posted(path, {**body, "stream": True}))
        wait_until(lambda: running(server) == 1)
        server.drain(0)
        heard = b"".join(iter(lambda: connection.recv(65536), b""))
    lines = [line.strip() for line in heard.split(b"\n")]
    told = [line for line in lines if line.startswith((b"data: ", b"{"))][-1]
    failed = json.loads(told.removeprefix(b"data: "))["error"]
    assert failed[error[0]] == error[1] if error else isinstance(failed, str)
    assert name is None or lines[lines.index(told) - 1] == name
    assert not any(end in heard for end in (b"[DONE]", b"message_stop", b'"done":true'))


def test_an_answer_that_ended_in_time_is_sent_whole(serve, monkeypatch):
    """Sending has the rest of the time that a server gives its answers, however late its thread."""
    monkeypatch.setattr(listen, "FLUSH_SECONDS", 0.0)
    writing, waiting, go_on = (threading.Event() for _ in range(3))
    write, busy = listen.ResponseTask.write, listen.HttpServer._busy

    def late(task: listen.ResponseTask, data: bytes) -> None:
        writing.set()
        assert go_on.wait(PATIENCE_SECONDS)
        write(task, data)

    def looking(http: listen.HttpServer) -> bool:
        waiting.set()
        return busy(http)

    monkeypatch.setattr(listen.ResponseTask, "write", late)
    monkeypatch.setattr(listen.HttpServer, "_busy", looking)
    with serve() as server, ThreadPoolExecutor(2) as threads:
        reply = threads.submit(Http(server.url).post, COMPLETIONS, {**LONG, "max_tokens": 3})
        assert writing.wait(PATIENCE_SECONDS)
        drained = threads.submit(server.drain, PATIENCE_SECONDS)
        wait_until(lambda: waiting.is_set() or drained.done())
        go_on.set()
        assert reply.result().json["usage"]["completion_tokens"] == 3
        drained.result()


def test_one_who_never_reads_is_cut_off(serve, monkeypatch):
    """The slot is freed though the socket stays open, which is closed later; others are answered
    meanwhile."""
    monkeypatch.setattr(listen, "UNSENT_BYTES", 1024)
    monkeypatch.setattr(listen, "SOCKET_BYTES", 1024)
    monkeypatch.setattr(listen, "UNREAD_SECONDS", int(10 * PATIENCE_SECONDS))
    with serve(buffered_events=4) as server:
        http = Http(server.url)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        with connection:
            connection.settimeout(PATIENCE_SECONDS)
            connection.connect(http.address)
            body = {**LONG, "stream": True, "n": 4, "logprobs": 20}
            connection.sendall(posted(COMPLETIONS, body))
            wait_until(lambda: sum(ended(server).values()) == 4)
            assert {reason.value for reason in ended(server)} == {"client_too_slow"}
            assert running(server) == 0
            assert http.post(COMPLETIONS, {**LONG, "max_tokens": 3}).status == 200
            monkeypatch.setattr(listen, "UNREAD_SECONDS", 1)
            wait_until(lambda: server.service.ledger.total(LOCAL_TENANT).requests == 2)
            assert server.service.ledger.total(LOCAL_TENANT).completed == 1


def test_too_many_header_bytes(http):
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for head in (
        b"X: " + b"a" * (40 << 10),
        b"X: " + b"a" * (1 << 20),
        b"\r\n".join(b"X%d: a" % number for number in range(10_000)),
    ):
        answer = http.raw(start + head + b"\r\n\r\n")
        assert answer.split(b" ")[1] == b"431"
        assert b'{"error":{' in answer
    assert http.get("/health").status == 200


@pytest.mark.parametrize("length", [1 << 30, 9 << 20])
def test_a_body_that_is_too_long(http, length):
    """Refused from what it says of itself, and also when it says nothing."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    answer = http.raw(head.encode())
    assert answer.split(b" ")[1] == b"413"
    assert b'{"error":{' in answer


def test_a_slow_request_is_given_up(serve, monkeypatch):
    """A byte now and then keeps no connection, and others are answered all the while."""
    monkeypatch.setattr(listen, "RECEIVE_SECONDS", 1)
    with serve() as server:
        http = Http(server.url)
        with http.connected() as connection:
            connection.sendall(posted(COMPLETIONS, LONG)[:-20])
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not gone(connection):
                assert time.monotonic() < deadline
                assert http.get("/health").status == 200
                time.sleep(0.1)


def gone(connection: socket.socket) -> bool:
    """Whether the other end does not take one more byte."""
    try:
        connection.sendall(b" ")
    except OSError:
        return True
    return False


def test_a_full_queue_says_when_to_come_back(serve, monkeypatch):
    """Ten times what may wait: all are answered or refused at once, and nothing is lost."""
    monkeypatch.setattr(listen, "SILENT_SECONDS", PATIENCE_SECONDS)
    steps = hold_steps(monkeypatch)
    with serve(slots=1, queue_depth=2) as server:
        http = Http(server.url)
        body = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}
        with ThreadPoolExecutor(30) as clients:
            answers = [clients.submit(http.post, COMPLETIONS, body) for _ in range(30)]
            wait_until(lambda: sum(answer.done() for answer in answers) == 28)
            steps.allow()
            replies = [answer.result() for answer in answers]
        refused = [reply for reply in replies if reply.status == 503]
        assert sorted(reply.status for reply in replies) == [200] * 2 + [503] * 28
        for reply in refused:
            assert reply.error["code"] == "queue_full"
            assert int(reply.headers["Retry-After"]) >= 1
            assert reply.headers["x-should-retry"] == "true"
        total = server.service.ledger.total(LOCAL_TENANT)
        assert (total.requests, total.completed, total.rejected) == (30, 2, 28)


@pytest.mark.parametrize("stream", [True, False])
def test_a_fault_under_way_is_told_and_counted_once(serve, monkeypatch, caplog, stream):
    """The client hears of it, the log has no message, and the slot is free."""
    with serve() as server:
        http = Http(server.url)

        def fail(*arguments: object, **options: object) -> bytes:
            raise RuntimeError("SEC" + "RET")

        monkeypatch.setattr(type(server.service.model.tokenizer), "token_bytes", fail)
        reply = http.post(COMPLETIONS, {**LONG, "stream": stream})
        assert b'"code":"internal_error"' in reply.body
        assert b"[DONE]" not in reply.body
        wait_until(lambda: running(server) == 0)
        total = server.service.ledger.total(LOCAL_TENANT)
        assert (total.requests, total.failed, total.rejected) == (1, 1, 0)
    assert "RuntimeError" in caplog.text
    assert "SECRET" not in caplog.text


def test_who_leaves_before_there_is_text_is_no_fault(serve, monkeypatch, caplog):
    """The first tokens say nothing yet: no part of a stream is due that would find out that nobody
    reads it, and the slot is free all the same."""
    steps = hold_steps(monkeypatch, 0)
    monkeypatch.setattr(streams, "POLL_SECONDS", PATIENCE_SECONDS)
    body = {**LONG, "stream": True, "logit_bias": {str(SILENT): 100}}
    with serve() as server:
        with Http(server.url).connected() as connection:
            connection.sendall(posted(COMPLETIONS, body))
            wait_until(lambda: not server.service.model.driver.call(lambda engine: engine.idle))
        wait_until(lambda: not server.http._server.active_channels)
        steps.allow(3)
        wait_until(lambda: server.service.ledger.total(LOCAL_TENANT).requests == 1)
        wait_until(lambda: running(server) == 0)
        total = server.service.ledger.total(LOCAL_TENANT)
    assert (total.failed, total.abandoned) == (0, 1)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_large_bodies_that_never_end_take_little_memory(server, http, monkeypatch):
    """The one that would be too much is refused; the one before it and small ones are answered."""
    monkeypatch.setattr(listen, "ARRIVING_BYTES", 3 << 20)
    body = posted(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "made_up": "x" * (2 << 20)})
    channels = server.http._server.active_channels
    with http.connected() as first, http.connected() as second:
        first.sendall(body[:-1])
        wait_until(lambda: sum(one.arriving for one in channels.values()) > 2 << 20)
        with suppress(ConnectionError):
            second.sendall(body[:-1])
        answer = b""
        with suppress(ConnectionError):
            answer = second.recv(65536)
        assert not answer or answer.startswith(b"HTTP/1.1 503")
        assert http.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status == 200
        first.sendall(body[-1:])
        assert first.recv(65536).startswith(b"HTTP/1.1 200")
