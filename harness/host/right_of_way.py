"""Who computes next of the threads that share one interpreter.

A thread that lets go of the interpreter, as the engine's does whenever it calls the device, gets it
back only after the threads that wait for it. So those of a server compute one at a time, and begin
to while the engine's thread waits for a step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOST_SECONDS = 0.005
"""The longest that a thread waits for its turn, and then for the engine's thread to wait."""


class RightOfWay:
    """The engine's thread calls ``take`` when it has work and ``give`` before it waits. The others
    ``enter`` before they compute and ``leave`` when they have. No wait is longer than MOST_SECONDS,
    so whoever keeps its turn too long only slows others down."""

    def __init__(self) -> None:
        self._given = threading.Event()
        self._given.set()
        self._turn = threading.Lock()
        self._own = threading.local()

    def take(self) -> None:
        """Let nobody begin to compute."""
        self._given.clear()

    def give(self) -> None:
        """Let others compute."""
        self._given.set()

    def enter(self) -> None:
        """Wait for a turn to compute."""
        self._own.inside = True
        self._own.has_turn = self._turn.acquire(timeout=MOST_SECONDS)
        self._given.wait(MOST_SECONDS)

    def leave(self) -> bool:
        """Let the next thread have its turn; whether this one was inside."""
        own = self._own.__dict__
        inside: bool = own.pop("inside", False)
        if own.pop("has_turn", False):
            self._turn.release()
        return inside

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leave while the block waits for something, and enter again if this thread was inside."""
        inside = self.leave()
        try:
            yield
        finally:
            if inside:
                self.enter()
