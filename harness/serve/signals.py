"""Signals of a server's process: which end it, and which has it read its tenants again."""

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
"""Windows has no such signal."""
log = logging.getLogger("zinc_rt.serve")


class Signals:
    """Handles the signals of this process while the context lasts. The main thread owns it.

    Until ``hold`` any signal interrupts the main thread, since no client can be connected yet. From
    then on ``serve_until_stopped`` acts on them."""

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
        """Note signals from now on instead of interrupting."""
        self._holding = True

    def serve_until_stopped(self, server: Running, drain_seconds: float) -> bool:
        """Answer until SIGTERM, which drains, or SIGINT, which does not; a second signal cuts a
        drain, and a third one ends the process. SIGHUP reads the file of tenants again; a server
        without one drains.

        Returns whether the signal was SIGINT, or a second one came."""
        number = self._next()
        while number == RELOAD and server.models.accounts.path is not None:
            log.info("reading the tenants again")
            try:
                server.models.accounts.reload(server.models.change_tenants)
            except EngineStopped as error:
                log.error("the tenants stay as they were: %s", error)
            number = self._next()
        self._ending = True
        interrupted = number == signal.SIGINT
        notify_supervisor("STOPPING=1")
        if not interrupted:
            log.info("draining for up to %.0f s; another signal ends it", drain_seconds)
        cut = self._drain(server, 0.0 if interrupted else drain_seconds)
        return interrupted or cut

    def _drain(self, server: Running, seconds: float) -> bool:
        """Drain the server until it is done or a signal cuts it; whether one did.

        A thread of its own drains: an exception that a signal raises in the middle of it could
        leave a lock held, or a thread that waits unnotified, and the server would never end."""
        drained: Future[None] = Future()

        def drain() -> None:
            try:
                server.drain(seconds)
            except BaseException as error:
                drained.set_exception(error)
            else:
                drained.set_result(None)
            self._wakes.send(b"\0")

        thread = threading.Thread(target=drain, name="drain", daemon=True)
        thread.start()
        while not (drained.done() or self._received):
            self._woken.recv(64)
        cut = bool(self._received)
        if cut:
            server.drain(0.0)
        thread.join()
        drained.result()
        return cut

    def _next(self) -> int:
        """The next signal, once it arrives."""
        while not self._received:
            self._woken.recv(64)
        return self._received.popleft()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._holding:
            self.ended_early = number
            raise KeyboardInterrupt
        self._received.append(number)
        if self._ending:
            # All is being cut. An exception would meet that anywhere and could stop it; the system
            # ends the process whatever its threads do.
            for caught in self._before:
                signal.signal(caught, signal.SIG_DFL)


NOTIFY_SOCKET = "NOTIFY_SOCKET"


def notify_supervisor(state: str) -> None:
    """Send ``READY=1`` or ``STOPPING=1`` to the supervisor that started the server by systemd's
    ``Type=notify`` protocol, if there is one; see sd_notify(3)."""
    address = os.environ.get(NOTIFY_SOCKET, "")
    if address[:1] not in ("/", "@"):
        return
    # An abstract socket's name begins with a zero byte.
    name = f"\0{address[1:]}" if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.sendto(state.encode(), name)
