"""What a process of ours does first."""

import signal
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


def lose_an_owner() -> None:
    """Interrupt in the callback of a weak reference; KeyboardInterrupt comes for certain."""
    keep_interrupts()
    owners = [Owner()]
    reference = weakref.ref(owners[0], interrupt)
    with pytest.raises(KeyboardInterrupt):
        lose_and_wait(owners)
    assert reference() is None


def lose_and_wait(owners: list[Owner]) -> None:
    owners.clear()
    time.sleep(DEADLINE_SECONDS)


def test_an_interrupt_python_throws_away_comes_again(monkeypatch):
    """Ctrl-C while the callback of a weak reference runs: Python only reports that one."""
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    lose_an_owner()
    assert ignored == []


def test_an_interrupt_comes_again_when_its_report_takes_long(monkeypatch):
    """One that comes while the first is reported would be lost as well."""
    slow = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        slow(thread)
        time.sleep(20 * AGAIN_SECONDS)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    lose_an_owner()


def test_other_exceptions_python_throws_away_are_reported(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.append(args.exc_type))
    keep_interrupts()
    owner = Owner()
    reference = weakref.ref(owner, lambda _: 1 // 0)
    del owner
    assert reference() is None
    assert reported == [ZeroDivisionError]
