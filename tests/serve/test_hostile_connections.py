"""Sockets that lie about their bodies, crowd out others, or whose owners vanished."""

import ctypes
import itertools
import json
import os
import socket
import struct
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import pytest
from waitress.utilities import Error
from werkzeug.test import Client

from contract.types import LOCAL_TENANT
from harness.serve import listen
from harness.serve.app import App, AppOptions
from harness.serve.gate import HostCheck
from harness.serve.pulls import Pulls
from harness.serve.run import Running
from tests.held_steps import hold_steps
from tests.needs import machine_lacks
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.serve.http import Http, closing_after, posted, slow_reader
from tests.serve.test_connections import COMPLETIONS, LONG, heard_until, running

SO_ATTACH_FILTER = 26
"""Linux's number; Python has no name for it."""
BPF_RET = 0x06
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def status_of(answer: bytes) -> bytes:
    """The status of the first response, whose body is one error."""
    assert b'{"error":{' in answer
    return answer.split(b" ")[1]


def vanish(connection: socket.socket) -> None:
    """The peer's machine is gone: from now on its kernel drops whatever arrives, and acknowledges
    nothing. A packet filter of one instruction, which keeps no byte."""
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RET, 0, 0, 0))
    program = struct.pack("H6xP", 1, ctypes.addressof(instruction))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def abort(connection: socket.socket) -> None:
    """Close with a reset instead of an orderly end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_body_of_chunks_without_end(http):
    """Refused once it is longer than any body may be."""
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = b""
    with http.connected() as connection:
        with suppress(ConnectionError):
            connection.sendall(HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(1 << 10):
                connection.sendall(chunk)
        with suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
    assert not answer or status_of(answer) == b"413"
    assert http.get("/health").status == 200


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("Content-Length: -1", b"400"),
        ("Content-Length: 2\r\nContent-Length: 3", b"400"),
        ("Content-Length: 1e3", b"400"),
        ("Content-Length: 99999999999999999999", b"413"),
        ("Transfer-Encoding: gzip, chunked", b"501"),
        ("Transfer-Encoding: chunked\r\nContent-Length: 2", b"400"),
        ("Content-Encoding: gzip\r\nContent-Length: 2", b"415"),
        ("Content Length: 2", b"400"),
        ("X: a\nY: b", b"400"),
        ("Content-Length: " + "1" * 5000, b"400"),
        ("Transfer-Encoding: chunked, chunked", b"400"),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", b"400"),
    ],
)
def test_headers_that_lie_about_the_body(http, lines, status):
    answer = http.raw(f"{HEAD}{lines}\r\nConnection: close\r\n\r\n{{}}".encode())
    assert status_of(answer) == status


@pytest.mark.parametrize("version", ["1.0", "1.2", "2.0", "0.9"])
@pytest.mark.parametrize("length", ["", "Content-Length: 4\r\n"])
def test_a_body_of_chunks_of_another_version(http, version, length):
    """Its chunks are not read, so what follows the head must not be the next request."""
    head = HEAD.replace("HTTP/1.1", f"HTTP/{version}") + "Connection: keep-alive\r\n" + length
    smuggled = b"GET /health HTTP/1.0\r\n\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(smuggled), smuggled)
    answer = http.raw(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert status_of(answer) == b"400"
    assert answer.count(b"HTTP/1.") == 1


@pytest.mark.parametrize("address", ["http://[", "http://[/health", "http://a]b/", "x://[::1/"])
def test_an_address_that_is_none(http, address, caplog):
    assert (
        status_of(http.raw(f"GET {address} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())) == b"400"
    )
    assert not caplog.records


@pytest.mark.parametrize("begun", [b"", b"5;a=", b"0\r\nX: "])
def test_a_line_without_end_between_chunks(http, begun):
    """To join what arrived of it with each part takes a time that grows with its square."""
    head = HEAD.encode() + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = http.raw(head + begun + b"1" * (2 * listen.MAX_HEADER_BYTES))
    assert status_of(answer) == b"400"


def test_urgent_data_wakes_nobody(http, caplog):
    """It is no part of the request, and no reason to look at the connection again and again."""
    with http.connected() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        connection.send(b"!", socket.MSG_OOB)
        for _ in range(5):
            assert http.get("/health").status == 200
        connection.sendall(b"Connection: close\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert not caplog.records


def test_bodies_and_answers_need_no_disk(serve, monkeypatch, tmp_path):
    """A large one of either is kept in memory: a full disk for temporary files refuses nothing, and
    no text of a client is written there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no such folder"))
    monkeypatch.setattr(listen, "SOCKET_BYTES", 4096)
    large = {"prompt": ["a b"] * 64, "max_tokens": 64, "ignore_eos": True, "logprobs": 20}
    with serve() as server:
        http = Http(server.url)
        body = {"prompt": "a", "max_tokens": 1, "made_up": "x" * (2 << 20)}
        assert http.post(COMPLETIONS, body).status == 200
        with closing(slow_reader(http)) as connection:
            connection.sendall(closing_after(posted(COMPLETIONS, large)))
            wait_until(lambda: running(server) == 0 and unsent(server) > 1 << 20)
            answer = b""
            while part := connection.recv(65536):
                answer += part
    told = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert len(told["choices"]) == 64


def unsent(server: Running) -> int:
    """Bytes of answers that the kernel has not taken."""
    return sum(one.total_outbufs_len for one in server.http._server.active_channels.values())


def test_a_body_shorter_than_it_says_begins_nothing(server, http):
    before = server.service.ledger.total(LOCAL_TENANT)
    with http.connected() as connection:
        connection.sendall(posted(COMPLETIONS, LONG)[:-1])
    assert http.get("/health").json["active"] == 0
    assert server.service.ledger.total(LOCAL_TENANT) == before


def test_what_follows_a_body_is_a_request_of_its_own(http):
    """Never a part of the one before it."""
    first = posted(COMPLETIONS, {"prompt": "abc", "max_tokens": 1})
    answer = http.raw(first + b"{}\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"HTTP/1.1 400" in answer or b"HTTP/1.0 400" in answer


def test_forwarded_headers_are_not_believed(http):
    """Nobody becomes another by saying so."""
    told = {
        "X-Forwarded-Host": "evil.example",
        "Forwarded": "host=evil.example",
        "X-Forwarded-For": "1.2.3.4",
    }
    assert http.send("GET", "/v1/models", None, told).status == 200
    assert http.get("/v1/models", Host="evil.example", X_Forwarded_Host="localhost").status == 403


def test_nor_by_the_application_under_another_server(server, tmp_path):
    """Waitress takes them away before; whatever else is in front may not."""
    options = AppOptions(HostCheck(), {}, 1 << 20, "0", tmp_path)
    with closing(Pulls(tmp_path)) as pulls:
        asked = Client(App(server.models, pulls, options))
        for name in ("X-Forwarded-Host", "X-Forwarded-Server", "Forwarded", "X-Host"):
            for value in ("localhost", "host=localhost"):
                refused = asked.get("/health", headers={"Host": "evil.example", name: value})
                assert (refused.status_code, name) == (403, name)
            foreign = {"Host": "localhost", "Origin": "http://evil.example", name: "evil.example"}
            assert asked.get("/health", headers=foreign).status_code == 403
        assert asked.get("/health", headers={"Host": "localhost"}).status_code == 200


def test_a_request_that_arrives_too_slowly_is_told_so(serve, monkeypatch):
    """In its head and in its body."""
    monkeypatch.setattr(listen, "RECEIVE_SECONDS", 1)
    with serve() as server:
        http = Http(server.url)
        for begun in (b"GET /hea", HEAD.encode(), posted(COMPLETIONS, LONG)[:-5]):
            answer = http.raw(begun)
            assert status_of(answer) == b"408"
            assert b'"type":"timeout_error"' in answer


def test_a_request_behind_a_running_one_may_be_slow(serve, monkeypatch):
    """Being slow with the next one ends nothing that runs."""
    monkeypatch.setattr(listen, "RECEIVE_SECONDS", 1)
    steps = hold_steps(monkeypatch, 5)
    give_up = listen._Channel.give_up

    def noted(channel: listen._Channel, error: Error) -> None:
        give_up(channel, error)
        steps.allow()

    monkeypatch.setattr(listen._Channel, "give_up", noted)
    with serve() as server:
        body = {**LONG, "max_tokens": 80}
        answer = Http(server.url).raw(posted(COMPLETIONS, body) + b"GET /")
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b'"completion_tokens":80' in answer
        assert b" 408 " in answer


def test_idle_connections_crowd_out_nobody(serve):
    """Twice as many as are kept, all silent: the oldest go, and who asks is answered."""
    with serve(slots=1, queue_depth=1, tier="null") as server, ExitStack() as opened:
        http = Http(server.url)
        crowd = 2 * server.http.connections
        silent = [opened.enter_context(http.connected()) for _ in range(crowd)]
        assert http.get("/health").status == 200
        wait_until(lambda: open_channels(server) < server.http.connections)
        assert silent[0].recv(1) == b""
        silent[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert silent[-1].recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_a_crowd_never_closes_who_is_being_answered(serve, monkeypatch):
    steps = hold_steps(monkeypatch, 5)
    with serve(slots=1, queue_depth=1, tier="null") as server, ExitStack() as opened:
        http = Http(server.url)
        with http.connected() as honest:
            honest.sendall(posted(COMPLETIONS, {**LONG, "max_tokens": 60, "stream": True}))
            heard_until(honest, b"\n\n")
            crowd = 2 * server.http.connections
            silent = [opened.enter_context(http.connected()) for _ in range(crowd)]
            assert silent[0].recv(1) == b""
            steps.allow()
            assert b"[DONE]" in heard_until(honest, b"[DONE]")


def open_channels(server: Running) -> int:
    return len(server.http._server.active_channels)


@pytest.mark.parametrize("stream", [True, False])
def test_a_reset_frees_the_slot(server, http, monkeypatch, stream):
    hold_steps(monkeypatch, 5)
    with http.connected() as connection:
        connection.sendall(posted(COMPLETIONS, {**LONG, "stream": stream}))
        wait_until(lambda: running(server) == 1)
        if stream:
            heard_until(connection, b"\n\n")
        abort(connection)
    wait_until(lambda: running(server) == 0)


def test_a_client_that_vanished_frees_its_slot(serve, monkeypatch):
    """Nothing comes from it, neither an end nor a reset: what is sent stays unacknowledged."""
    if sys.platform != "linux":
        machine_lacks("packet filter that makes a peer vanish: it is not Linux")
    monkeypatch.setattr(listen, "UNREAD_SECONDS", 1)
    steps = hold_steps(monkeypatch, 5)
    with serve(tier="null") as server:
        http = Http(server.url)
        with http.connected() as connection:
            connection.sendall(posted(COMPLETIONS, {**LONG, "stream": True}))
            heard_until(connection, b"\n\n")
            vanish(connection)
            steps.allow(200)
            wait_until(lambda: running(server) == 0)
        made = server.service.model.driver.call(lambda engine: engine.statistics.steps)
        assert made < LONG["max_tokens"], "it ran to its end"
        steps.allow()
        assert http.post(COMPLETIONS, {**LONG, "max_tokens": 2}).status == 200


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_the_time_of_day_may_jump(serve, monkeypatch, jump):
    """Who reads is not cut off, however far it jumps; who does not read, or asks nothing, is."""
    of_day, ends, rounds = time.time, listen.HttpServer._end_slow_clients, itertools.count()
    monkeypatch.setattr(listen, "MAINTENANCE_SECONDS", 0.02)
    monkeypatch.setattr(listen, "SOCKET_BYTES", 4096)
    monkeypatch.setattr(listen, "UNREAD_SECONDS", int(10 * PATIENCE_SECONDS))

    def counted(self: listen.HttpServer) -> None:
        ends(self)
        next(rounds)

    monkeypatch.setattr(listen.HttpServer, "_end_slow_clients", counted)
    large = {"prompt": ["a b"] * 20, "max_tokens": 40, "ignore_eos": True, "logprobs": 20}
    with serve() as server:
        http = Http(server.url)
        with closing(slow_reader(http)) as reading, http.connected() as idle:
            reading.sendall(closing_after(posted(COMPLETIONS, large)))
            wait_until(lambda: running(server) == 0 and unsent(server) > 0)
            monkeypatch.setattr(time, "time", lambda: of_day() + jump)
            before = next(rounds)
            wait_until(lambda: next(rounds) > before + 20)
            idle.sendall(closing_after(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))
            assert idle.recv(65536).startswith(b"HTTP/1.1 200")
            assert heard_until(reading, b'"preemptions":0}}')
        with closing(slow_reader(http)) as unread, http.connected() as idle:
            unread.sendall(posted(COMPLETIONS, large))
            wait_until(lambda: running(server) == 0 and unsent(server) > 0)
            monkeypatch.setattr(listen, "UNREAD_SECONDS", 0.2)
            monkeypatch.setattr(listen, "IDLE_SECONDS", 0.2)
            assert idle.recv(1) == b""
            wait_until(lambda: open_channels(server) == 0)


def test_a_storm_of_clients_that_come_and_go_leaves_nothing(serve):
    """No slot, no page, no connection and no file."""
    with serve(tier="null") as server:
        http = Http(server.url)
        assert http.post(COMPLETIONS, {**LONG, "max_tokens": 2}).status == 200
        before = open_files()

        def visit(number: int) -> None:
            with suppress(OSError), http.connected() as connection:
                stream = bool(number % 2)
                data = posted(COMPLETIONS, {**LONG, "max_tokens": 60, "stream": stream})
                connection.sendall(data[: len(data) - (number % 3) * 20])
                if number % 15 == 0:
                    connection.recv(1)
                abort(connection)

        with ThreadPoolExecutor(8) as clients:
            list(clients.map(visit, range(200)))
        wait_until(lambda: server.service.model.driver.call(lambda engine: engine.idle))
        wait_until(lambda: open_channels(server) == 0)
        assert http.post(COMPLETIONS, {**LONG, "max_tokens": 2}).status == 200
        wait_until(lambda: open_files() <= before)
        now = server.service.model.driver.call(lambda engine: engine.statistics)
        assert now.free_pages + now.cached_pages == now.pages
