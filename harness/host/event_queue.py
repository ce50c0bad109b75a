"""Events from the thread that has them to the one that takes them.

Waking a thread for every token costs more than what it does then. So who takes may leave an offer
while it waits: what comes is offered to it first, on the thread that has it, and only what is not
accepted there is put into the queue and wakes who waits. Either way events come in order, and what
takes them and what is offered them never run at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from contract.errors import ZincError
from contract.types import TokenEvent


class Delivered(NamedTuple):
    """An event and when it was read, in seconds of ``time.monotonic``."""

    at: float
    event: TokenEvent


Offer = Callable[[Sequence[Delivered]], bool]
"""Accepts events that come together, all of them or none."""


class EventQueue:
    """A queue of events with two ends. One thread takes; others ``give``, which never waits for it
    longer than it takes to look whether there is something."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Delivered | Exception | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._offer: Offer | None = None
        self._accepted = float("-inf")

    def __len__(self) -> int:
        """How many events nobody has taken."""
        return self._queue.qsize()

    def give(self, events: Sequence[Delivered]) -> None:
        """Hand over events that come together. What an offer raises, who takes is told."""
        with self._turn:
            if self._offer is not None:
                try:
                    if self._offer(events):
                        self._accepted = time.monotonic()
                        return
                except Exception as error:
                    events = ()
                    self._queue.put(error)
                self._offer = None
            for event in events:
                self._queue.put(event)

    def fail(self, error: ZincError) -> None:
        """Have who takes told that nothing more comes."""
        with self._turn:
            self._offer = None
            self._queue.put(error)

    def wake(self) -> None:
        """End the waiting of who takes, and its offer. For offers, which hold the turn."""
        self._offer = None
        self._queue.put(None)

    def take(self, timeout: float, offer: Offer | None = None) -> list[Delivered]:
        """What there is, after waiting for the first event until for ``timeout`` seconds none came
        that ``offer`` accepted; empty if none did, or when it was woken. Raises the error in it."""
        until = time.monotonic() + timeout
        if offer is not None:
            with self._turn:
                if self._queue.empty():
                    self._offer = offer
        try:
            while True:
                try:
                    item = self._queue.get(timeout=max(0.0, until - time.monotonic()))
                    break
                except Empty:
                    if self._accepted + timeout <= until:
                        return []
                    until = self._accepted + timeout
        finally:
            if offer is not None:
                with self._turn:
                    self._offer = None
        return self._with_all_there_is(item)

    def _with_all_there_is(self, item: Delivered | Exception | None) -> list[Delivered]:
        taken: list[Delivered] = []
        while True:
            if isinstance(item, Exception):
                raise item
            if item is not None:
                taken.append(item)
            if self._queue.empty():
                return taken
            item = self._queue.get_nowait()
