"""Shows the progress of long work on standard error: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Protocol, TextIO

from contract.amounts import format_bytes
from harness.console import LossyStream, is_silent

if TYPE_CHECKING:
    from tqdm import tqdm

LINE_SECONDS = 2.0


class Progress(Protocol):
    """A display of one job at a time: ``start``, any number of ``advance``, ``close``.

    ``total`` and ``n`` count ``unit`` ("B" for bytes, otherwise a noun such as "token"); ``total``
    is None while unknown and 0 if it stays unknown, ``n`` is negative when work must be repeated.
    ``close`` without ``start`` does nothing."""

    def start(self, label: str, total: int | None, unit: str) -> None: ...

    def advance(self, n: int) -> None: ...

    def close(self) -> None: ...


class NullProgress:
    """Shows nothing."""

    def start(self, label: str, total: int | None, unit: str) -> None:
        pass

    def advance(self, n: int) -> None:
        pass

    def close(self) -> None:
        pass


SILENT = NullProgress()


class BarProgress:
    """A tqdm bar for a terminal; a ``transient`` bar is erased when its job is done."""

    def __init__(self, stream: TextIO | LossyStream, transient: bool = False) -> None:
        self._stream = stream
        self._transient = transient
        self._bar: tqdm[NoReturn] | None = None

    def start(self, label: str, total: int | None, unit: str) -> None:
        # This import takes a fifth of the time of all others, and most starts show no bar.
        from tqdm import tqdm

        self.close()
        scaled = unit == "B"
        self._bar = tqdm(
            desc=label,
            total=total,
            unit=unit if scaled else f" {unit}",
            unit_scale=scaled,
            file=self._stream,
            dynamic_ncols=True,
            leave=not self._transient,
        )

    def advance(self, n: int) -> None:
        assert self._bar is not None
        self._bar.update(n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LineProgress:
    """Prints a line every two seconds, so that a log is not flooded and short work prints nothing.

    A job of unknown length prints a line at once, since it may be waiting for something."""

    def __init__(
        self, stream: TextIO | LossyStream, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._label = ""
        self._total: int | None = None
        self._unit = ""
        self._done = 0
        self._shown: int | None = None
        self._next = 0.0

    def start(self, label: str, total: int | None, unit: str) -> None:
        self.close()
        self._label, self._total, self._unit = label, total, unit
        self._done, self._shown = 0, None
        self._next = self._clock() + LINE_SECONDS
        if total is None:
            print(f"{label} ...", file=self._stream, flush=True)

    def advance(self, n: int) -> None:
        self._done += n
        if self._clock() >= self._next:
            self._next = self._clock() + LINE_SECONDS
            self._line()

    def close(self) -> None:
        if self._shown is not None and self._shown != self._done:
            self._line()
        self._shown = None

    def _line(self) -> None:
        done = format_amount(self._done, self._unit)
        if self._total:
            share = 100 * self._done // self._total
            done = f"{share}% ({done} of {format_amount(self._total, self._unit)})"
        print(f"{self._label}: {done}", file=self._stream, flush=True)
        self._shown = self._done


def format_amount(amount: int, unit: str) -> str:
    """``amount`` with its unit; bytes are scaled by powers of 1000."""
    return format_bytes(amount) if unit == "B" else f"{amount:,} {unit}s"


def progress_on(stream: TextIO | None = None, *, transient: bool = False) -> Progress:
    """The progress display for ``stream`` (default: standard error).

    ``transient`` erases a bar when its job is done, for jobs whose result is shown next."""
    if is_silent():
        return SILENT
    lossy = LossyStream(sys.stderr if stream is None else stream)
    return BarProgress(lossy, transient) if lossy.isatty() else LineProgress(lossy)
