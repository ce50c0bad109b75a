"""A queue of events from the engine's thread to one reader.

Waking a thread for every token costs more than its work. So a waiting reader may register a
callback, the offer. The engine's thread calls it with new events; only events that it does not
accept are queued and wake the reader. Events stay in order, and reader and callback never run at
the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from contract.types import TokenEvent


class TimedEvent(NamedTuple):
    """An event, and the ``time.monotonic`` seconds at which it was read."""

    at: float
    event: TokenEvent


Offer = Callable[[Sequence[TimedEvent]], bool]
"""Accepts events that belong together, all or none, and returns whether it did."""


class EventQueue:
    """A queue of events for one reading thread. ``give`` never waits for the reader longer than for
    a look into the queue."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[TimedEvent | BaseException | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._offer: Offer | None = None
        self._accepted = float("-inf")

    def __len__(self) -> int:
        """The number of events in the queue."""
        return self._queue.qsize()

    def give(self, events: Sequence[TimedEvent]) -> bool:
        """Deliver events that belong together. An error of the offer goes to the reader. Returns
        whether the offer accepted them; else they are in the queue."""
        with self._turn:
            if self._offer is not None:
                try:
                    if self._offer(events):
                        self._accepted = time.monotonic()
                        return True
                except Exception as error:
                    events = ()
                    self._queue.put(error)
                self._offer = None
            for event in events:
                self._queue.put(event)
            return False

    def fail(self, error: BaseException) -> None:
        """Deliver ``error`` to the reader, and no more events."""
        with self._turn:
            self._offer = None
            self._queue.put(error)

    def wake(self) -> None:
        """End the reader's wait and its offer. Only an offer calls it, which holds the lock."""
        self._offer = None
        self._queue.put(None)

    def take(self, timeout: float, offer: Offer | None = None) -> list[TimedEvent]:
        """The available events, after waiting for the first one. The wait ends ``timeout`` seconds
        after the last event that ``offer`` accepted, or when it is woken; then the list is empty.
        Raises the delivered error."""
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

    def _with_all_there_is(self, item: TimedEvent | BaseException | None) -> list[TimedEvent]:
        taken: list[TimedEvent] = []
        while True:
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                taken.append(item)
            if self._queue.empty():
                return taken
            item = self._queue.get_nowait()
