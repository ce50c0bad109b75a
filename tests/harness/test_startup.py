"""What a process of ours does first."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from harness.startup import AGAIN_SECONDS, keep_interrupts

DEADLINE_SECONDS = 60


class Owner:
    """Something a weak reference can point to."""


def interrupt(_: weakref.ref[Owner]) -> None:
    signal.raise_signal(signal.SIGINT)


def lose_and_wait(owners: list[Owner]) -> None:
    owners.clear()
    time.sleep(DEADLINE_SECONDS)


def test_an_interrupt_python_throws_away_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the callback of a weak reference runs: Python only reports that one."""
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    keep_interrupts()
    owners = [Owner()]
    reference = weakref.ref(owners[0], interrupt)
    with pytest.raises(KeyboardInterrupt):
        lose_and_wait(owners)
    assert reference() is None
    assert ignored == []


def test_an_interrupt_comes_again_when_its_report_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that comes while the first is reported would be lost as well."""
    slow = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        slow(thread)
        time.sleep(20 * AGAIN_SECONDS)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    keep_interrupts()
    owners = [Owner()]
    reference = weakref.ref(owners[0], interrupt)
    with pytest.raises(KeyboardInterrupt):
        lose_and_wait(owners)
    assert reference() is None


def test_other_exceptions_python_throws_away_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.append(args.exc_type))
    keep_interrupts()
    owner = Owner()
    reference = weakref.ref(owner, lambda _: 1 // 0)
    del owner
    assert reference() is None
    assert reported == [ZeroDivisionError]


def test_numpy_is_whole_without_docstrings() -> None:
    """All of it loads and computes; what is written in Python has its own."""
    script = """
from harness.startup import prepare_process
prepare_process()
import numpy as np, numpy.ma, numpy.random, numpy.fft, numpy.polynomial, numpy.testing
assert np.zeros.__doc__ is None and np.sort.__doc__
assert np.ma.masked_array([1, 2], [0, 1]).sum() == np.linalg.det(np.eye(2)) == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
