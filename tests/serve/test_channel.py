"""Sending at once what the kernel takes: every byte goes out once and in order, by either way."""

import errno
import os
import resource
import socket
import threading
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waitress.channel import ClientDisconnected, HTTPChannel
from waitress.server import TcpWSGIServer

from harness.serve import listen
from harness.serve.listen import HttpServer, ListenOptions, _Channel, send_what_fits
from harness.serve.sockets import allow_descriptors
from tests.patience import PATIENCE_SECONDS


class Kernel:
    """A socket that takes so many bytes a time, and then no more."""

    def __init__(self, takes: list[int]) -> None:
        self.takes = takes
        self.sent = b""


def take(kernel: Kernel, data: bytes) -> int:
    """As ``send_what_fits``."""
    count = kernel.takes.pop(0) if kernel.takes else 0
    kernel.sent += data[:count]
    return min(count, len(data))


@pytest.fixture
def buffered(monkeypatch) -> list[bytes]:
    """What went by the buffers, of channels on a ``Kernel``."""
    buffered: list[bytes] = []

    def slow(self: _Channel, data: bytes) -> int:
        if not self.connected:
            raise ClientDisconnected
        buffered.append(data)
        self.total_outbufs_len += len(data)
        return len(data)

    monkeypatch.setattr(listen, "send_what_fits", take)
    monkeypatch.setattr(HTTPChannel, "write_soon", slow)
    return buffered


def channel(kernel: Kernel, **state: object) -> _Channel:
    """A connection on it."""
    made: _Channel = _Channel.__new__(_Channel)
    made.outbuf_lock = threading.Condition()
    made.socket, made.connected, made.will_close, made.total_outbufs_len = kernel, True, False, 0
    for name, value in state.items():
        setattr(made, name, value)
    return made


@given(
    st.lists(st.binary(min_size=1, max_size=9), max_size=12),
    st.lists(st.integers(0, 12), max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_byte_is_sent_once_and_in_order(buffered, parts, takes, at_once):
    """Once something waits in the buffers, all that follows does."""
    buffered.clear()
    kernel = Kernel(takes)
    one = channel(kernel)
    for part, first_at_once in zip(parts, at_once, strict=False):
        if not (first_at_once and one.send_at_once(lambda part=part: part)):
            assert one.write_soon(part) == len(part)
    assert kernel.sent + b"".join(buffered) == b"".join(parts)


def test_what_the_kernel_does_not_take_goes_by_the_buffers(buffered):
    """And what follows is not made before that was sent."""
    kernel = Kernel([3, 100])
    one = channel(kernel)
    assert one.send_at_once(lambda: b"token")
    assert (kernel.sent, buffered) == (b"tok", [b"en"])
    assert not one.send_at_once(never)
    one.total_outbufs_len = 0
    assert one.send_at_once(lambda: b"more")
    assert kernel.sent == b"tokmore"


@pytest.mark.parametrize(
    "state", [{"connected": False}, {"will_close": True}, {"total_outbufs_len": 1}]
)
def test_nothing_is_made_for_a_connection_that_cannot_take_it(state, buffered):
    kernel = Kernel([100])
    assert not channel(kernel, **state).send_at_once(never)
    assert (kernel.sent, buffered) == (b"", [])


def test_nobody_waits_for_one_who_is_sending(buffered):
    one = channel(Kernel([100]))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with one.outbuf_lock:
            held.set()
            done.wait(PATIENCE_SECONDS)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(PATIENCE_SECONDS)
    assert not one.send_at_once(never)
    done.set()
    holder.join()
    assert one.send_at_once(lambda: b"token")


def test_one_who_leaves_meanwhile_misses_it(buffered):
    """That is no error of who sends, which asks again soon enough."""
    kernel = Kernel([0])
    one = channel(kernel)

    def leave() -> bytes:
        one.connected = False
        return b"token"

    assert one.send_at_once(leave)
    assert (kernel.sent, buffered) == (b"", [])


def test_what_making_raises_is_told_and_nothing_is_held(buffered):
    one = channel(Kernel([100]))

    def fail() -> bytes:
        raise ValueError("of the maker")

    with pytest.raises(ValueError, match="of the maker"):
        one.send_at_once(fail)
    assert one.send_at_once(lambda: b"token")


def test_sending_tells_how_much_was_taken():
    """All, a part, and nothing where the buffers are full or nobody is there."""
    here, there = socket.socketpair()
    with here, there:
        assert send_what_fits(here, b"token") == 5
        assert there.recv(16) == b"token"
        large = bytes(1 << 22)
        sent = send_what_fits(here, large)
        assert 0 < sent < len(large)
        while send_what_fits(here, large):
            pass
        there.close()
        assert send_what_fits(here, b"token") == 0
    assert send_what_fits(here, b"token") == 0


def never() -> bytes:
    """What is not to be called."""
    raise AssertionError


@pytest.mark.parametrize("state", [{"connected": False}, {"will_close": True}])
def test_nothing_is_sent_on_a_connection_that_ends(state, buffered):
    kernel = Kernel([100])
    with suppress(ClientDisconnected):
        channel(kernel, **state).write_soon(b"token")
    assert kernel.sent == b""


@pytest.mark.parametrize("room", [1, 5, 100])
def test_connections_that_come_together_are_accepted_together(room):
    """One look at the socket accepts all, up to the limit of connections."""
    clients = 8
    server = HttpServer(lambda environ, start: [], ListenOptions("127.0.0.1", 0, 1, 1024))
    watched = server._server._map
    own = len(watched)
    server._server.adj.connection_limit = own + room
    with closing(server), ExitStack() as connected:
        for _ in range(clients):
            address = ("127.0.0.1", server.port)
            connected.enter_context(socket.create_connection(address, PATIENCE_SECONDS))
        server._server.handle_accept()
        assert len(watched) == own + min(clients, room)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_without_descriptors_there_are_fewer_connections(number, monkeypatch, caplog):
    """The silent ones end, so that others are heard; what failed is not tried without end."""
    monkeypatch.setattr(listen, "SILENT_SECONDS", 0.0)
    server = HttpServer(lambda environ, start: [], ListenOptions("127.0.0.1", 0, 8, 1024))
    accept, channels = TcpWSGIServer.accept, server._server.active_channels

    def limited(self: TcpWSGIServer) -> Any:
        if len(channels) == 12:
            raise OSError(number, os.strerror(number))
        return accept(self)

    monkeypatch.setattr(TcpWSGIServer, "accept", limited)
    with closing(server), ExitStack() as connected:
        address = ("127.0.0.1", server.port)
        clients = [
            connected.enter_context(socket.create_connection(address, PATIENCE_SECONDS))
            for _ in range(40)
        ]
        # Sent before it is accepted: a silent client may be closed at once.
        clients[-1].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        server.start()
        assert clients[-1].recv(8) == b"HTTP/1.1"
        assert len(channels) <= 9
    (line,) = [one.message for one in caplog.records if "ulimit" in one.message]
    assert line == f"{os.strerror(number)}: at most 9 connections for 60 s; see ulimit -n"


@pytest.mark.parametrize("look", ["_make_room", "_end_slow_clients"])
def test_one_who_has_just_spoken_is_not_closed_for_silence(look, monkeypatch):
    """Its bytes lie in the kernel: the end of the connection would be an error to it."""
    for name in ("SILENT_SECONDS", "IDLE_SECONDS", "CROWDED"):
        monkeypatch.setattr(listen, name, 0.0)
    server = HttpServer(lambda environ, start: [], ListenOptions("127.0.0.1", 0, 8, 1024))
    with closing(server), ExitStack() as connected:
        address = ("127.0.0.1", server.port)
        clients = [
            connected.enter_context(socket.create_connection(address, PATIENCE_SECONDS))
            for _ in range(3)
        ]
        server._server.handle_accept()
        assert len(server._server.active_channels) == 3
        speaking = clients[0]
        speaking.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        clients[1].shutdown(socket.SHUT_WR)
        getattr(server, look)()
        (left,) = server._server.active_channels.values()
        assert left.addr == speaking.getsockname()
        server.start()
        assert speaking.recv(8) == b"HTTP/1.1"


def test_one_who_sends_without_end_is_silent_as_long_as_its_request(monkeypatch):
    """Else such clients would keep all others out."""
    for name in ("SILENT_SECONDS", "CROWDED"):
        monkeypatch.setattr(listen, name, 0.0)
    server = HttpServer(lambda environ, start: [], ListenOptions("127.0.0.1", 0, 8, 1024))
    with (
        closing(server),
        socket.create_connection(("127.0.0.1", server.port), PATIENCE_SECONDS) as sending,
    ):
        server._server.handle_accept()
        (channel,) = server._server.active_channels.values()
        while channel.receiving_since is None:
            sending.sendall(b"GET / HTTP/1.1\r\n")
            server._poll.once(0.0)
        sending.sendall(b"Host: x\r\n")
        server._make_room()
        assert not server._server.active_channels


@pytest.mark.parametrize(("clients", "left"), [(0, 0), (8, 6)])
def test_later_there_may_be_as_many_connections_as_before(clients, left, monkeypatch):
    """Of what the system lacked for a moment the server does not stay smaller."""
    for name in ("EXHAUSTED_SECONDS", "MAINTENANCE_SECONDS"):
        monkeypatch.setattr(listen, name, 0.05)
    server = HttpServer(lambda environ, start: [], ListenOptions("127.0.0.1", 0, 8, 1024))
    most, accept = server.connections, TcpWSGIServer.accept
    problems: list[OSError] = []

    def failing(self: TcpWSGIServer) -> Any:
        if problems:
            raise problems.pop()
        return accept(self)

    monkeypatch.setattr(TcpWSGIServer, "accept", failing)
    address = ("127.0.0.1", server.port)
    with closing(server), ExitStack() as connected:
        for _ in range(clients):
            connected.enter_context(socket.create_connection(address, PATIENCE_SECONDS))
        server._server.handle_accept()
        problems.append(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
        assert server._accept() is None
        assert server.connections == left
        assert not server._server.readable(), "it would be asked again at once"
        server.start()
        client = connected.enter_context(socket.create_connection(address, PATIENCE_SECONDS))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(8) == b"HTTP/1.1"
        assert (server.connections, server._server.adj.connection_limit) == (most, most)


def test_as_many_descriptors_are_allowed_as_there_may_be(monkeypatch):
    limits = [(256, 4096), (256, 500), (1024, 4096), (256, -1), (-1, -1)]
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: set_to.append(pair))
    while limits:
        allow_descriptors(1000)
        limits.pop(0)
    assert set_to == [(1000, 4096), (500, 500), (1000, -1)]
