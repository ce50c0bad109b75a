"""Requests that arrive together are computed together; one alone is not waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from harness.host import arrivals
from harness.host.arrivals import Arrivals
from tests.patience import PATIENCE_SECONDS


class Turns:
    """A condition on which nobody waits long: each wait is one of ``turns``."""

    def __init__(self, *turns: Callable[[], None]) -> None:
        self.turns = [*turns]
        self.waits = 0

    def wait(self, timeout: float) -> bool:
        self.waits += 1
        if self.turns:
            self.turns.pop(0)()
        return True


def reading(these: Arrivals) -> Callable[[], bool]:
    """One more request, which a thread of its own reads until the function is called. Returns what
    ``submit`` returns."""
    these.arrived()

    def end() -> bool:
        ended: list[bool] = []

        def read() -> None:
            these.begin()
            ended.append(these.submit())

        thread = threading.Thread(target=read)
        thread.start()
        thread.join(PATIENCE_SECONDS)
        return ended[0]

    return end


def test_one_request_is_not_waited_for() -> None:
    """Once it is read none is left, and none waits in the kernel."""
    these, changed = Arrivals(), Turns()
    assert not reading(these)()
    these.gather(changed)
    assert changed.waits == 0


def test_all_that_arrived_are_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "GATHER_SECONDS", PATIENCE_SECONDS)
    these, told = Arrivals(), list[bool]()
    reading(these)()
    ends = [reading(these) for _ in range(5)]
    changed = Turns(*(lambda end=end: told.append(end()) for end in ends))
    these.gather(changed)
    assert changed.waits == 5
    assert told == [True, True, True, True, False], "the last one wakes the engine"


def test_what_the_kernel_has_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that connects is one of them before anybody knows of its request."""
    monkeypatch.setattr(arrivals, "GATHER_SECONDS", PATIENCE_SECONDS)
    these, pending = Arrivals(), [True]
    reading(these)()
    these.more = lambda: bool(pending)

    def accept() -> None:
        pending.clear()
        end.append(reading(these))

    end: list[Callable[[], bool]] = []
    changed = Turns(accept, lambda: end[0]() and None)
    these.gather(changed)
    assert changed.waits == 2
    assert not these.gathering


def test_one_that_is_not_read_on_is_not_waited_for() -> None:
    """Such as a long text that is divided into tokens."""
    these, changed = Arrivals(), Turns()
    reading(these)()
    end = reading(these)
    these.gather(changed)
    assert changed.waits == 1
    assert not end(), "nobody waits any more"


def test_the_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many more arrive."""
    monkeypatch.setattr(arrivals, "GATHER_SECONDS", 0.0)
    these = Arrivals()
    reading(these)()
    reading(these)
    changed = Turns(*([these.arrived] * 100))
    these.gather(changed)
    assert changed.waits == 1


def test_other_work_is_not_held_up() -> None:
    """Such as reading the counters while a request is read."""
    these, changed = Arrivals(), Turns()
    reading(these)
    these.gather(changed)
    assert changed.waits == 0


def test_a_request_counts_once() -> None:
    """Its thread reads it, submits all of its choices, and writes its answer."""
    these = Arrivals()
    these.arrived()
    these.arrived()
    these.begin()
    these.submit()
    these.submit()
    these.end()
    changed = Turns()
    these.gather(changed)
    assert changed.waits == 1, "the other one is still there"
