"""A queue of events from the engine's thread to one reader.

Waking a thread for every token costs more than what it does then. So a reader that waits may
register a callback, the offer: the giving thread calls it with new events, and only events that it
does not accept are put into the queue and wake the reader. Either way events come in order, and the
reader and its callback never run at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from contract.types import TokenEvent


class TimedEvent(NamedTuple):
    """An event and when it was read, in seconds of ``time.monotonic``."""

    at: float
    event: TokenEvent


Offer = Callable[[Sequence[TimedEvent]], bool]
"""Accepts events that come together, all of them or none."""


class EventQueue:
    """A queue of events. One thread takes; others ``give``, which never waits for the reader for
    longer than it takes to look into the queue."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[TimedEvent | BaseException | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._offer: Offer | None = None
        self._accepted = float("-inf")

    def __len__(self) -> int:
        """The number of events in the queue."""
        return self._queue.qsize()

    def give(self, events: Sequence[TimedEvent]) -> None:
        """Pass on events that come together. The reader gets what its offer raises."""
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

    def fail(self, error: BaseException) -> None:
        """Let the reader get ``error`` instead of more events."""
        with self._turn:
            self._offer = None
            self._queue.put(error)

    def wake(self) -> None:
        """End the reader's waiting, and its offer. Only an offer calls it, which holds the lock."""
        self._offer = None
        self._queue.put(None)

    def take(self, timeout: float, offer: Offer | None = None) -> list[TimedEvent]:
        """The events there are, after waiting for the first one. The wait ends ``timeout`` seconds
        after the last event that ``offer`` accepted, or when it is woken; then there are none.
        Raises the error that was given."""
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
