"""Waitress, with the limits it lacks: its defaults take a body of 1 GiB, four requests at a time,
one that is sent for ever, and do not notice a client that leaves while it waits."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.server import create_server
from waitress.task import ErrorTask

from contract.errors import ConfigError
from harness.serve.errors import ApiError

SPARE_THREADS = 16
"""Threads beyond one for each request that may run or wait: they answer everything else."""
MAX_HEADER_BYTES = 32 << 10
RECEIVE_SECONDS = 30
"""How long a request may take to arrive, from its first byte to its last."""
IDLE_SECONDS = 60
"""How long a connection without a request is kept."""
UNREAD_SECONDS = 10
"""How long a client may leave an answer unread, once the buffers for it are full."""
UNSENT_BYTES = 64 << 10
"""Bytes of an answer that wait for a client to read before its thread does."""
SOCKET_BYTES = 64 << 10
"""The kernel's part of that: what a client has not read it keeps twice over."""
LOOKAHEAD_REQUESTS = 1
"""Reading on while a request is answered is how a client that leaves is noticed."""
MAINTENANCE_SECONDS = 1
FLUSH_SECONDS = 2.0


class _RefusalTask(ErrorTask):  # type: ignore[misc]
    """What waitress refuses by itself, in the shape of all refusals."""

    def execute(self) -> None:
        error = self.request.error
        message = f"{error.reason}: the request cannot be read"
        told = ApiError(error.code, message, code=error.reason.lower().replace(" ", "_"))
        body = told.encoded()
        self.status = f"{error.code} {error.reason}"
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection that remembers since when its next request has been arriving."""

    error_task_class = _RefusalTask
    receiving_since: float | None = None

    def received(self, data: bytes) -> bool:
        taken: bool = super().received(data)
        if self.request is None:
            self.receiving_since = None
        elif self.receiving_since is None:
            self.receiving_since = time.monotonic()
        return taken


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where to listen, for how many requests at once, with bodies of at most ``max_body`` bytes.

    Port 0 is any free one.
    """

    host: str
    port: int
    requests: int
    max_body: int


class HttpServer:
    """An application on a socket. ``start`` it, and ``close`` it when nobody waits any more."""

    def __init__(self, app: Any, options: ListenOptions) -> None:
        """Binds the socket. Raises ConfigError when that is not possible."""
        self._map: dict[int, Any] = {}
        threads = options.requests + SPARE_THREADS
        self._server = create_server(
            app,
            map=self._map,
            sockets=[_bound(options.host, options.port)],
            threads=threads,
            ident=None,
            connection_limit=2 * threads,
            backlog=min(4096, 2 * threads),
            max_request_body_size=options.max_body,
            max_request_header_size=MAX_HEADER_BYTES,
            channel_request_lookahead=LOOKAHEAD_REQUESTS,
            channel_timeout=IDLE_SECONDS,
            cleanup_interval=MAINTENANCE_SECONDS,
            outbuf_high_watermark=UNSENT_BYTES,
            asyncore_use_poll=True,
            clear_untrusted_proxy_headers=True,
        )
        self._server.channel_class = _Channel
        kept = (socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._server.adj.socket_options = [*self._server.adj.socket_options, kept]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.effective_port)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Send what is still to be sent, for a moment at most, and close all connections. A second
        time does nothing."""
        if self._stopping.is_set():
            return
        deadline = time.monotonic() + FLUSH_SECONDS
        while time.monotonic() < deadline and self._busy():
            time.sleep(0.02)
        self._stopping.set()
        self._server.pull_trigger()
        if self._thread.ident is not None:
            self._thread.join()
        self._server.task_dispatcher.shutdown(timeout=FLUSH_SECONDS)
        wasyncore.close_all(self._map)

    def _busy(self) -> bool:
        channels = list(self._server.active_channels.values())
        return any(channel.requests or channel.total_outbufs_len for channel in channels)

    def _run(self) -> None:
        while not self._stopping.is_set():
            wasyncore.loop(timeout=MAINTENANCE_SECONDS, use_poll=True, map=self._map, count=1)
            self._end_slow_clients()

    def _end_slow_clients(self) -> None:
        """Close the connections on which a request, or the reading of an answer, takes too long."""
        latest = time.monotonic() - RECEIVE_SECONDS
        latest_sent = time.time() - UNREAD_SECONDS
        for channel in list(self._server.active_channels.values()):
            since = getattr(channel, "receiving_since", None)
            unread = channel.total_outbufs_len and channel.last_activity < latest_sent
            if unread or (since is not None and since < latest):
                channel.handle_close()


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to the first address of ``host``."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from None
