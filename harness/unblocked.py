"""Standard error of a process that must go on though nobody reads what it says."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
import time

ROOM_SECONDS = 1.0
"""How long a line waits for whoever reads, unless the one before waited in vain."""
AT_ONCE_BYTES = 512
"""Bytes that can be written without a wait where ``poll`` says that there is room: POSIX promises
this number for pipes."""


class UnblockedStream(io.TextIOBase):
    """Writes whole lines to a descriptor as long as there is room. Others are lost, and counted in
    a line once there is room again. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.RLock()
        self._unfinished = ""
        self._lost = 0
        self._cut = False
        self._written = _unblocked_terminal(descriptor)
        self._room = select.poll()
        self._room.register(self._written, select.POLLOUT)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        with self._lock:
            whole, end, rest = (self._unfinished + text).rpartition("\n")
            self._unfinished = rest
            self._send(whole + end)
        return len(text)

    def flush(self) -> None:
        """Write what is no whole line, too."""
        with self._lock:
            rest, self._unfinished = self._unfinished, ""
            self._send(rest)

    def _send(self, text: str) -> None:
        if not text:
            return
        if self._lost:
            begin = "\n" if self._cut else ""
            if self._sent(f"{begin}[{self._lost} lines were lost: nobody read]\n"):
                self._lost = 0
        if self._lost or not self._sent(text):
            self._lost += max(1, text.count("\n"))

    def _sent(self, text: str) -> bool:
        """Write a text, unless there is no room. Returns whether all of it was."""
        data = memoryview(text.encode(self.encoding, self.errors))
        by = time.monotonic() + (0.0 if self._lost else ROOM_SECONDS)
        while data:
            try:
                if not self._room.poll(1000 * max(0.0, by - time.monotonic())):
                    return False
                data = data[os.write(self._written, data[:AT_ONCE_BYTES]) :]
            except OSError:
                return False
            self._cut = bool(data)
        return True


def _unblocked_terminal(descriptor: int) -> int:
    """A descriptor for the same terminal that never waits, since ``poll`` says that there is room
    if there is some; else ``descriptor``. Other programs share that one, so it stays as it is."""
    try:
        name = os.ttyname(descriptor)
        return os.open(name, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return descriptor


def unblock_standard_error() -> None:
    """Replace ``sys.stderr`` where it is a stream of the system."""
    try:
        descriptor = sys.stderr.fileno()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return
    if hasattr(select, "poll"):  # Windows has none.
        sys.stderr = UnblockedStream(descriptor)
