"""Signals of a server's process: termination, and rereading the tenants file."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from types import FrameType
from typing import Self

from harness.host.submissions import EngineStopped
from harness.serve.run import Running

RELOAD: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""None on Windows."""
log = logging.getLogger("zinc_rt.serve")


class Signals:
    """Handles the signals of this process until the context ends. For the main thread only.

    Until ``hold`` a signal interrupts the main thread, since no client is connected yet. After it
    ``serve_until_stopped`` handles signals."""

    def __init__(self) -> None:
        self._received: deque[int] = deque()
        self._holding = False
        self.ended_early: int | None = None
        """The signal that interrupted the start, or None."""
        self._ending = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        # A signal that arrives just before the main thread begins to wait must wake it, too: a byte
        # in a socket does, an interrupted lock does not.
        self._wakes, self._woken = socket.socketpair()
        self._wakes.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        for number in filter(None, (signal.SIGTERM, signal.SIGINT, RELOAD)):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup_before)
        self._wakes.close()
        self._woken.close()

    def hold(self) -> None:
        """From now on queue signals instead of interrupting."""
        self._holding = True

    def serve_until_stopped(self, server: Running, drain_seconds: float) -> bool:
        """Serve until SIGTERM, which drains, or SIGINT, which does not. A second signal ends a
        drain, a third one the process. SIGHUP rereads the tenants file; without such a file it
        drains.

        Returns whether the signal was SIGINT, or a second one came."""
        begin, drained = self._drain_thread(server)
        number = self._next()
        while number == RELOAD and server.models.accounts.path is not None:
            log.info("reading the tenants again")
            try:
                server.models.accounts.reload(server.models.change_tenants)
            except EngineStopped as error:
                log.error("it is not known whether the tenants changed: %s", error)
            number = self._next()
        self._ending = True
        interrupted = number == signal.SIGINT
        notify_supervisor("STOPPING=1")
        if not interrupted:
            log.info("draining for up to %.0f s; another signal ends it", drain_seconds)
        begin.set_result(0.0 if interrupted else drain_seconds)
        while not (drained.done() or self._received):
            self._woken.recv(64)
        cut = bool(self._received)
        if cut:
            server.drain(0.0)
        drained.result()
        return interrupted or cut

    def _drain_thread(self, server: Running) -> tuple[Future[float], Future[None]]:
        """Start a thread that drains the server once it has the seconds for that. Returns what
        takes them, and what is done when the server is drained.

        In the main thread, an exception raised by a signal could leave a lock held or a waiting
        thread without notification, and the server would never end. The thread starts with the
        server: later the system may refuse one."""
        begin, drained = Future[float](), Future[None]()

        def drain() -> None:
            try:
                server.drain(begin.result())
            except BaseException as error:
                drained.set_exception(error)
            else:
                drained.set_result(None)
            with suppress(OSError):
                self._wakes.send(b"\0")

        threading.Thread(target=drain, name="drain", daemon=True).start()
        return begin, drained

    def _next(self) -> int:
        """Wait for the next signal."""
        while not self._received:
            self._woken.recv(64)
        return self._received.popleft()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._holding:
            self.ended_early = number
            raise KeyboardInterrupt
        self._received.append(number)
        if self._ending:
            # The default handler ends the process at once. An exception could only interrupt the
            # shutdown at any line, and so prevent it.
            for caught in self._before:
                signal.signal(caught, signal.SIG_DFL)


NOTIFY_SOCKET = "NOTIFY_SOCKET"


def notify_supervisor(state: str) -> None:
    """Send ``READY=1`` or ``STOPPING=1`` by systemd's ``Type=notify`` protocol, if systemd started
    the server; see sd_notify(3)."""
    address = os.environ.get(NOTIFY_SOCKET, "")
    if address[:1] not in ("/", "@"):
        return
    # An abstract socket's name begins with a zero byte.
    name = f"\0{address[1:]}" if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.sendto(state.encode(), name)
