"""Ctrl-C that waits for a call to end."""

from __future__ import annotations

# The functions of the module ``signal`` make objects of enums, and take as long as all else here.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from harness.interrupts import raises_interrupt


class LateInterrupt:
    """A context in which Ctrl-C calls ``hurry`` and does not raise KeyboardInterrupt before the
    end. If ``hurry`` returns False, or Ctrl-C comes again, it is raised at once. Does nothing where
    Ctrl-C raises nothing, and in other threads than the main one.

    A class, because it surrounds every step: a generator takes microseconds."""

    __slots__ = ("_before", "_came", "_hurry")

    def __init__(self, hurry: Callable[[], bool]) -> None:
        self._hurry = hurry
        self._came = False
        self._before: object = None

    def __enter__(self) -> None:
        before = _signal.getsignal(_signal.SIGINT)
        if raises_interrupt(before) and threading.current_thread() is threading.main_thread():
            self._before = before
            _signal.signal(_signal.SIGINT, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if callable(self._before):
            _signal.signal(_signal.SIGINT, self._before)
            if self._came and error is None:
                self._before(_signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self._came = self._came, True
        if (again or not self._hurry()) and callable(self._before):
            self._before(number, frame)
