"""Signals of a server's process: which end it, and which has it read its tenants again."""

from __future__ import annotations

import logging
import signal
from queue import SimpleQueue
from types import FrameType
from typing import Self

from harness.serve import supervisor
from harness.serve.run import Running

RELOAD: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""Windows has no such signal."""
log = logging.getLogger("zinc_rt.serve")


class Signals:
    """Handles the signals of this process while the context lasts. The main thread owns it.

    Until ``hold`` any signal interrupts the main thread, since no client can be connected yet. From
    then on ``serve_until_stopped`` acts on them.
    """

    def __init__(self) -> None:
        # Its ``put`` may interrupt its own ``get``, which no lock of ``threading`` allows.
        self._received: SimpleQueue[int] = SimpleQueue()
        self._holding = False
        self._ending = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in filter(None, (signal.SIGTERM, signal.SIGINT, RELOAD)):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def hold(self) -> None:
        """Note signals from now on instead of interrupting."""
        self._holding = True

    def serve_until_stopped(self, server: Running, drain_seconds: float) -> bool:
        """Answer until SIGTERM, which drains, or SIGINT, which does not; a second signal cuts a
        drain. SIGHUP reads the file of tenants again; a server without one drains.

        Returns whether the signal was SIGINT.
        """
        try:
            number = self._received.get()
            while number == RELOAD and server.serving.accounts.path is not None:
                log.info("reading the tenants again")
                server.serving.accounts.reload(server.serving.tell)
                number = self._received.get()
            self._ending = True
            if not self._received.empty():
                raise KeyboardInterrupt
            interrupted = number == signal.SIGINT
            supervisor.tell("STOPPING=1")
            if not interrupted:
                log.info("draining for up to %.0f s; another signal ends it", drain_seconds)
            server.drain(0.0 if interrupted else drain_seconds)
        except KeyboardInterrupt:
            interrupted = True
        return interrupted

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._ending or not self._holding:
            raise KeyboardInterrupt
        self._received.put(number)
