"""Which signals a server acts on, and that none is missed."""

import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.host.submissions import EngineStopped
from harness.serve import signals
from harness.serve.run import Running
from harness.serve.signals import Signals
from tests.patience import PATIENCE_SECONDS


def server_of(
    reload: Callable[[object], None], drained: list[float], path: str | None = "tenants.toml"
) -> Any:
    accounts = SimpleNamespace(path=path, reload=reload)
    return SimpleNamespace(
        models=SimpleNamespace(accounts=accounts, change_tenants=None), drain=drained.append
    )


def never(tell: object) -> None:
    raise AssertionError("the tenants are read again")


def test_a_signal_before_the_wait_is_not_missed(monkeypatch):
    """Also where it arrives between the look at what came and the wait for more."""
    received = signals.deque

    class Late(received):  # type: ignore[misc, valid-type]
        """Nothing has come when it is asked for the first time, and then something has."""

        asked = 0

        def __len__(self) -> int:
            Late.asked += 1
            if Late.asked == 1:
                signal.raise_signal(signal.SIGTERM)
                return 0
            return int(super().__len__())

    monkeypatch.setattr(signals, "deque", Late)
    drained: list[float] = []
    with Signals() as caught:
        caught.hold()
        assert not caught.serve_until_stopped(server_of(never, drained), 7.0)
    assert drained == [7.0]


def test_a_server_drains_where_the_system_refuses_threads(monkeypatch):
    """A limit that is reached once it runs: its answers must not be cut."""
    drained: list[float] = []

    def begun(server: Signals) -> int:
        monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a new thread"))
        return int(signal.SIGTERM)

    monkeypatch.setattr(Signals, "_next", begun)
    with Signals() as caught:
        caught.hold()
        assert not caught.serve_until_stopped(server_of(never, drained), 7.0)
    assert drained == [7.0]


def test_signals_of_another_thread_wake_the_main_one():
    """One that reloads, then one that ends; handlers are as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    drained: list[float] = []
    threads: list[threading.Timer] = []

    def raise_soon(number: signal.Signals) -> None:
        threads.append(threading.Timer(0.1, signal.raise_signal, [number]))
        threads[-1].start()

    with Signals() as caught:
        caught.hold()
        raise_soon(signal.SIGHUP)
        server = server_of(lambda change: raise_soon(signal.SIGTERM), drained)
        assert not caught.serve_until_stopped(server, 7.0)
        for thread in threads:
            thread.join()
    assert (len(threads), drained) == (2, [7.0])
    assert {number: signal.getsignal(number) for number in before} == before


def test_sighup_after_the_device_was_lost_ends_nothing():
    """The engine takes no tenants then; the server still answers what it can."""
    reads: list[object] = []

    def refused(tell: object) -> None:
        reads.append(tell)
        signal.raise_signal(signal.SIGTERM)
        raise EngineStopped("the device was lost")

    drained: list[float] = []
    with Signals() as caught:
        caught.hold()
        signal.raise_signal(signal.SIGHUP)
        assert not caught.serve_until_stopped(server_of(refused, drained), 7.0)
    assert (len(reads), drained) == (1, [7.0])


def test_ctrl_c_cuts_and_sighup_without_tenants_drains():
    for number, path, seconds in ((signal.SIGINT, "tenants.toml", 0.0), (signal.SIGHUP, None, 7.0)):
        drained: list[float] = []
        with Signals() as caught:
            caught.hold()
            signal.raise_signal(number)
            interrupted = caught.serve_until_stopped(server_of(never, drained, path), 7.0)
        assert (interrupted, drained) == (number == signal.SIGINT, [seconds])


def test_a_second_signal_cuts_a_drain():
    with Signals() as caught:
        caught.hold()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        drained: list[float] = []
        assert caught.serve_until_stopped(server_of(never, drained), 7.0)
    assert sorted(drained) == [0.0, 7.0]


def test_a_signal_raises_nothing_in_a_drain():
    """An exception in the middle of a drain could leave a lock held, and the server waiting."""
    cut = threading.Event()
    ended: list[float] = []

    def drain(seconds: float) -> None:
        if seconds == 0:
            cut.set()
        else:
            signal.raise_signal(signal.SIGTERM)
            assert cut.wait(PATIENCE_SECONDS)
        ended.append(seconds)

    server = SimpleNamespace(drain=drain)
    with Signals() as caught:
        caught.hold()
        signal.raise_signal(signal.SIGTERM)
        assert caught.serve_until_stopped(cast(Running, server), 7.0)
    assert sorted(ended) == [0.0, 7.0]


def test_what_a_drain_raises_is_raised():
    def drain(seconds: float) -> None:
        raise OSError("broken")

    with Signals() as caught:
        caught.hold()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(OSError, match="broken"):
            caught.serve_until_stopped(cast(Running, SimpleNamespace(drain=drain)), 7.0)


def test_before_it_listens_a_signal_interrupts():
    with Signals(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
