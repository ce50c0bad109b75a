"""Notices that the thread of the engines hangs: what it began does not end."""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from contract.garbage import frame_of
from harness.host import step_times

log = logging.getLogger("zinc_rt.serve")
WATCH_SECONDS = 1.0
"""Seconds between two looks at the thread."""
END_SECONDS = 10.0
"""How long the thread may work on once the server has drained."""
DEBUGGERS = frozenset({"bdb", "pydevd", "_pydevd_bundle", "debugpy"})
"""Modules in whose frames a thread waits for a person."""


class UnheardTime:
    """The seconds since something was last heard, as a thread counts them that looks again and
    again. Where far more time passes between two of its looks, the process was stopped, or the
    machine slept; that does not count."""

    def __init__(self, interval: float) -> None:
        self.seconds = 0.0
        self._interval = interval
        self._looked = time.monotonic()

    def look(self, heard: bool) -> None:
        """Count the time since the last look, or begin again."""
        now = time.monotonic()
        passed = min(now - self._looked, 2 * self._interval)
        self.seconds, self._looked = 0.0 if heard else self.seconds + passed, now


def other_patience() -> float:
    """How long work between steps may take."""
    return step_times.OTHER_SECONDS


def _nothing() -> None:
    pass


class TurnWatch:
    """Watches a thread that says when it begins and ends a turn of work. ``on_hang`` is called, in
    a thread of this class, when a turn takes too long; until it ends, ``silence`` is ``words``."""

    def __init__(self, words: str, on_hang: Callable[[], None]) -> None:
        self.thread = 0
        """The identity of the thread."""
        self.silence: str | None = None
        self._words = words
        self._patience = other_patience
        self._on_hang = on_hang
        self._turn = 0
        self._busy = False
        self._end_by = math.inf
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._run, name="turns", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._watch.start()

    def begin(self, patience: Callable[[], float] = other_patience) -> None:
        """The thread begins a turn, which may take the seconds that ``patience`` gives; one before
        it ends."""
        self._patience = patience
        self._turn += 1
        self._busy, self.silence = True, None

    def end(self) -> None:
        """The thread has nothing to do."""
        self._turn += 1
        self._busy, self.silence = False, None

    def close(self) -> None:
        """The thread has ended, and what it called is referred to no more."""
        self.end()
        self._patience, self._on_hang = other_patience, _nothing
        self._ended.set()

    def end_by(self, at: float) -> None:
        """From END_SECONDS after ``at`` on, a turn that lasts for END_SECONDS is taken to hang."""
        self._end_by = at + END_SECONDS

    @property
    def ending(self) -> bool:
        """Whether ``end_by`` was called."""
        return self._end_by < math.inf

    def _run(self) -> None:
        seen, told = -1, False
        unheard = UnheardTime(WATCH_SECONDS)
        while not self._ended.wait(WATCH_SECONDS):
            turn = self._turn
            frame = frame_of(self.thread) if self._busy else None
            unheard.look(not self._busy or turn != seen or _is_debugged(frame))
            seen = turn
            late = time.monotonic() >= self._end_by and unheard.seconds >= END_SECONDS
            if self.silence is not None:
                continue
            if told:
                log.warning("the engine goes on")
                told = False
            if self._busy and (late or unheard.seconds >= self._patience()):
                self.silence = self._words
                if turn != self._turn:  # It ended meanwhile.
                    self.silence = None
                    continue
                told = True
                stack = "" if frame is None else "".join(traceback.format_stack(frame))
                log.error("the engine hangs, for %.0f s in\n%s", unheard.seconds, stack)
                self._on_hang()


def _is_debugged(frame: FrameType | None) -> bool:
    """Whether a debugger holds a thread for a person."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False
