"""Waitress as the HTTP server, with stricter limits.

Its defaults accept bodies of 1 GiB, answer four requests at a time, wait for ever for a slow
request, and do not notice that a client disconnects while it waits."""

from __future__ import annotations

import errno
import logging
import math
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from waitress import wasyncore
from waitress.channel import ClientDisconnected, HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.server import TcpWSGIServer, create_server
from waitress.utilities import Error

from harness.serve.request_parser import (
    MAX_HEADER_BYTES,
    NoRoom,
    RefusalTask,
    RequestParser,
    TooSlow,
)
from harness.serve.sockets import (
    allow_descriptors,
    bound_socket,
    has_arrived,
    received,
    send_what_fits,
    socket_options,
    write_byte,
)
from harness.serve.wsgi_task import ResponseTask

log = logging.getLogger("zinc_rt.serve")

SPARE_THREADS = 16
"""Threads for short requests, beside one for each request that may run or wait."""
RECEIVE_SECONDS = 30
"""Longest time from the first to the last byte of a request."""
IDLE_SECONDS = 60
"""Seconds that a connection without a request stays open."""
UNREAD_SECONDS = 10
"""How long a client may not read an answer whose buffers are full."""
UNSENT_BYTES = 64 << 10
"""Bytes of an answer that are buffered before its thread waits for the client."""
SOCKET_BYTES = 64 << 10
"""Send buffer of the kernel, which allocates twice as much."""
LOOKAHEAD_REQUESTS = 1
"""Requests read ahead on a connection: reading notices that the client disconnects."""
CONNECTIONS_PER_THREAD = 2
CROWDED = 0.75
"""Above this share of the possible connections, silent ones are closed, the longest silent first.
So idle connections do not lock out other clients."""
SILENT_SECONDS = 1.0
"""A connection without a complete request for this time is silent."""
MAINTENANCE_SECONDS = 1
LOOKS = 0.1
"""Part of it between two looks at all connections while requests come and go."""
FLUSH_SECONDS = 2.0
READABLE = select.POLLIN
"""Not POLLPRI: a byte of urgent data would end every wait at once until the connection ends."""
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of an operating system that has nothing left for a further connection."""
EXHAUSTED_SECONDS, MAX_EXHAUSTED_SECONDS = 60.0, 3600.0
"""How long there are fewer connections after the first of such errors, and after many: after each
one twice as long."""
LEAST_CONNECTIONS = 4
SPARE_DESCRIPTORS = 128
"""Files that may be open besides connections."""
IN_MEMORY = 1 << 40
"""Bytes of a body or an answer that are kept in memory and not in a file: all."""
LARGE_BODY = 256 << 10
ARRIVING_BYTES = 256 << 20
"""Most bytes of unfinished requests, of which those with large bodies are refused beyond it."""


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection. Knows since when a request has been arriving, and sends without buffering if
    possible."""

    task_class = ResponseTask
    error_task_class = RefusalTask
    parser_class = RequestParser
    request: HTTPRequestParser | None
    receiving_since: float | None = None
    _active_at = 0.0

    @property
    def last_activity(self) -> float:
        """When bytes last went either way, in seconds of a clock that nobody sets."""
        return self._active_at

    @last_activity.setter
    def last_activity(self, wall_time: float) -> None:
        self._active_at = time.monotonic()

    def recv(self, buffer_size: int) -> bytes:
        """Read available bytes; falls back to the library for none and for errors."""
        return received(self.socket, buffer_size) or super().recv(buffer_size)

    def received(self, data: bytes) -> bool:
        taken: bool = super().received(data)
        if self.request is None:
            self.receiving_since = None
        elif self.receiving_since is None:
            self.receiving_since = time.monotonic()
        elif self.arriving > LARGE_BODY:
            others = [*self.server.active_channels.values()]
            if sum([one.arriving for one in others]) > ARRIVING_BYTES:
                self.give_up(NoRoom(""))
        return taken

    @property
    def arriving(self) -> int:
        """The bytes that are there of a body that is not complete."""
        return 0 if self.request is None else int(self.request.body_bytes_received)

    def write_soon(self, data: bytes) -> int:
        """Send without buffering if nothing is queued. The library queues the rest and handles
        errors."""
        sent = self._sent_at_once(data) if type(data) is bytes else 0
        if 0 < sent == len(data):
            return sent
        return sent + int(super().write_soon(data[sent:] if sent else data))

    def _sent_at_once(self, data: bytes) -> int:
        with self.outbuf_lock:
            if not self.connected or self.total_outbufs_len or self.will_close:
                return 0
            sent = send_what_fits(self.socket, data)
            if sent:
                self._active_at = time.monotonic()
            return sent

    def send_at_once(self, make: Callable[..., bytes], *given: Any) -> bool:
        """Send the bytes that ``make`` makes of ``given`` without waiting; the library queues what
        the kernel does not accept. Returns False without calling ``make`` if other bytes are queued
        or the connection ends. For any thread, while no other thread writes."""
        if not self.outbuf_lock.acquire(blocking=False):
            return False
        try:
            if not self.connected or self.total_outbufs_len or self.will_close:
                return False
            data = make(*given)
            sent = send_what_fits(self.socket, data)
            self._active_at = time.monotonic()
            if sent < len(data):
                # With empty buffers this does not wait. A client that just left misses the rest.
                with suppress(ClientDisconnected):
                    super().write_soon(data[sent:])
            return True
        finally:
            self.outbuf_lock.release()

    def silence(self) -> float:
        """Seconds without activity of the client, or since its request began to arrive; 0 while a
        request is answered."""
        if self.requests or self.total_outbufs_len:
            return 0.0
        if self.receiving_since is not None:
            return time.monotonic() - self.receiving_since
        return time.monotonic() - self.last_activity

    def end_silence(self) -> None:
        """Close it, unless a request has just arrived and is not read yet: its client would get an
        error instead of an answer."""
        if self.receiving_since is not None or not has_arrived(self.socket):
            self.handle_close()

    def give_up(self, error: Error) -> None:
        """Refuse the request that is arriving, after earlier requests were answered."""
        with self.requests_lock:
            request = self.request
            self.request = self.receiving_since = None
            if request is None:
                return
            request.error = error
            request.completed = True
            self.requests.append(request)
            if len(self.requests) == 1:
                self.server.add_task(self)


def _accept_all(server: TcpWSGIServer) -> None:
    """Accept all pending connections, up to the limit; waitress accepts one a poll."""
    before = -1
    while before < len(server._map) < server.adj.connection_limit:
        before = len(server._map)
        TcpWSGIServer.handle_accept(server)


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """``requests``: how many may run or wait. ``max_body``: most bytes of a body. Port 0 is any
    free port."""

    host: str
    port: int
    requests: int
    max_body: int


class _Poll:
    """Waits for connections that can be read or written, and lets them. Waitress's own loop asks
    every connection through two calls each time, and makes a list of all for the kernel."""

    def __init__(self, connections: dict[int, Any], trigger: int) -> None:
        """``trigger``: the descriptor whose other end is one of the connections."""
        self._connections = connections
        self._trigger = trigger
        self._woken = False
        self._poll = select.poll()
        self._registered: dict[int, int] = {}

    def once(self, seconds: float) -> None:
        """Wait up to ``seconds``, and handle what is ready."""
        self._woken = False
        self._register()
        for descriptor, events in self._poll.poll(seconds * 1000):
            one = self._connections.get(descriptor)
            if one is not None:
                wasyncore.readwrite(one, events)

    def wake(self) -> None:
        """End the wait, for a connection that another thread changed. All that change one before
        the next look at them need one wake."""
        if not self._woken:
            self._woken = True
            write_byte(self._trigger)

    def end(self) -> None:
        """Wake nobody from now on: the descriptor will be closed."""
        self._woken = True

    def _register(self) -> None:
        registered, wanted = self._registered, {}
        for descriptor, one in list(self._connections.items()):
            if type(one) is not _Channel:
                events = READABLE if one.readable() else 0
            elif one.total_outbufs_len or one.will_close or one.close_when_flushed:
                events = select.POLLOUT
            else:
                events = READABLE if len(one.requests) <= LOOKAHEAD_REQUESTS else 0
            if events:
                wanted[descriptor] = events
                if events != registered.get(descriptor):
                    self._poll.register(descriptor, events)
        for descriptor in registered.keys() - wanted.keys():
            self._poll.unregister(descriptor)
        self._registered = wanted


class HttpServer:
    """Serves a WSGI application on a socket from ``start`` to ``close``."""

    def __init__(self, app: Any, options: ListenOptions) -> None:
        """Binds the socket. Raises ConfigError if that fails."""
        self._map: dict[int, Any] = {}
        threads = options.requests + SPARE_THREADS
        self.connections = CONNECTIONS_PER_THREAD * threads
        allow_descriptors(self.connections + SPARE_DESCRIPTORS)
        self._server = create_server(
            app,
            map=self._map,
            sockets=[bound_socket(options.host, options.port)],
            threads=threads,
            ident=None,
            connection_limit=self.connections,
            backlog=min(4096, self.connections),
            max_request_body_size=options.max_body,
            max_request_header_size=MAX_HEADER_BYTES,
            channel_request_lookahead=LOOKAHEAD_REQUESTS,
            inbuf_overflow=IN_MEMORY,
            outbuf_overflow=IN_MEMORY,
            outbuf_high_watermark=UNSENT_BYTES,
            # ``ResponseTask`` drops them.
            clear_untrusted_proxy_headers=False,
        )
        self._server.channel_class = _Channel
        # The library's maintenance goes by the time of day, which may jump.
        self._server.maintenance = lambda now: None
        self._server.handle_accept = partial(_accept_all, self._server)
        self._server.accept = self._accept
        own = socket_options(SOCKET_BYTES, UNREAD_SECONDS)
        self._server.adj.socket_options = [*self._server.adj.socket_options, *own]
        self._most, self._fewer_until = self.connections, math.inf
        self._fewer_for = EXHAUSTED_SECONDS
        self._poll = _Poll(self._map, self._server.trigger.trigger)
        self._server.pull_trigger = self._poll.wake
        self._stopping = threading.Event()
        self._close_by = math.inf
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.effective_port)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self, seconds: float = 0.0) -> None:
        """Send the pending answers for up to ``seconds``, at least FLUSH_SECONDS, then close all
        connections. A second call meanwhile may shorten the time; a later one does nothing."""
        self._close_by = min(self._close_by, time.monotonic() + max(seconds, FLUSH_SECONDS))
        while time.monotonic() < self._close_by and not self._stopping.is_set() and self._busy():
            time.sleep(0.02)
        with self._closing:
            if self._stopping.is_set():
                return
            self._stopping.set()
            self._poll.wake()
            if self._thread.ident is not None:
                self._thread.join()
            self._poll.end()
            self._server.task_dispatcher.shutdown(timeout=FLUSH_SECONDS)
            wasyncore.close_all(self._map)

    def _busy(self) -> bool:
        channels = list(self._server.active_channels.values())
        return any(channel.requests or channel.total_outbufs_len for channel in channels)

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stopping.is_set():
            self._poll.once(MAINTENANCE_SECONDS)
            now = time.monotonic()
            if now - looked >= MAINTENANCE_SECONDS * LOOKS:
                looked = now
                self._end_slow_clients()
            if now >= self._fewer_until:
                self._fewer_until, self.connections = math.inf, self._most
                self._server.adj.connection_limit = self._most
            self._make_room()

    def _end_slow_clients(self) -> None:
        """Close idle connections, and end what arrives or is read too slowly."""
        now = time.monotonic()
        for channel in list(self._server.active_channels.values()):
            if channel.total_outbufs_len and channel.last_activity < now - UNREAD_SECONDS:
                channel.handle_close()
            elif (channel.receiving_since or now) < now - RECEIVE_SECONDS:
                channel.give_up(TooSlow(""))
            elif channel.silence() > IDLE_SECONDS:
                channel.end_silence()

    def _accept(self) -> Any:
        """The next connection, or None. If there can be no further one, there are to be a quarter
        less for a while, which leaves room for files."""
        try:
            return TcpWSGIServer.accept(self._server)
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            active = len(self._server.active_channels)
            if active > LEAST_CONNECTIONS:
                self.connections, seconds = int(0.75 * active), self._fewer_for
                self._fewer_for = min(2 * seconds, MAX_EXHAUSTED_SECONDS)
            else:
                # It is not for connections that something is lacking.
                self.connections, seconds = active, MAINTENANCE_SECONDS
            self._fewer_until = time.monotonic() + seconds
            self._server.adj.connection_limit = len(self._map) - active + self.connections
            log.warning(
                "%s: at most %d connections for %.0f s; see ulimit -n",
                error.strerror,
                self.connections,
                seconds,
            )
            return None

    def _make_room(self) -> None:
        """If there are many connections, close those with the longest silence."""
        excess = len(self._server.active_channels) - int(CROWDED * self.connections)
        if excess <= 0:
            return
        silent = [(one.silence(), one) for one in self._server.active_channels.values()]
        silent.sort(key=lambda pair: pair[0], reverse=True)
        for seconds, channel in silent[:excess]:
            if seconds > SILENT_SECONDS:
                channel.end_silence()
