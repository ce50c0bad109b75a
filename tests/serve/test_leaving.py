"""A client that leaves, or a server that closes, while the engine's thread is within a step."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from contract.cancel_token import CancelToken
from contract.types import Request
from harness.host.engine_thread import EngineThread
from harness.host.stream_driver import EventStream
from harness.host.submissions import EngineStopped, Submission
from harness.host.threaded_driver import ThreadedDriver
from reference.cpu.tier import CpuTier
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.patience import PATIENCE_SECONDS, wait_until

LIMITS = Limits(slots=2, context=96, pages=12, step_tokens=32, step_rows=4)
PROMPT = tuple(range(60))
HELD = 3
"""The op before which the first step is held."""
Leave = Callable[[EngineThread, ThreadedDriver, EventStream], None]


@pytest.fixture(scope="module")
def runner(tiny_model_path) -> Iterator[ModelRunner]:
    model = open_model(tiny_model_path)
    with model.file, CpuTier() as tier, ModelRunner(model, tier, LIMITS) as runner:
        yield runner


class Held:
    """Holds the first step before an op until it is let go; counts the ops that may begin."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.goes = threading.Event(), threading.Event()
        self.ops = 0
        cancelled = CancelToken.cancelled.fget
        assert cancelled is not None

        def look(token: CancelToken) -> bool:
            self.ops += 1
            if self.ops == HELD:
                self.begun.set()
                assert self.goes.wait(PATIENCE_SECONDS)
            return cancelled(token)

        patch.setattr(CancelToken, "cancelled", property(look))


def a_client_leaves(thread: EngineThread, driver: ThreadedDriver, stream: EventStream) -> None:
    stream.cancel()


def it_leaves_after_some_tokens(
    thread: EngineThread, driver: ThreadedDriver, stream: EventStream
) -> None:
    stream.cancel(1, 0)


def the_model_is_closed(thread: EngineThread, driver: ThreadedDriver, stream: EventStream) -> None:
    driver.close()


def the_process_ends(thread: EngineThread, driver: ThreadedDriver, stream: EventStream) -> None:
    thread.close()


def driver_on(thread: EngineThread, runner: ModelRunner) -> ThreadedDriver:
    return thread.add(lambda observer: Engine(runner, EngineOptions(), observer=observer))


def submitted(driver: ThreadedDriver, *requests: Request) -> EventStream:
    """A stream of requests, of which the engine's thread has accepted all."""
    stream = driver.open_stream()
    assert driver.submit_to(stream, [Submission([one]) for one in requests]) == [None] * len(
        requests
    )
    return stream


@pytest.mark.parametrize(
    "leave", [a_client_leaves, it_leaves_after_some_tokens, the_model_is_closed, the_process_ends]
)
def test_the_step_ends(runner, leave, monkeypatch):
    """At its next op, and no other step of the prompt begins."""
    with EngineThread() as thread:
        driver, held = driver_on(thread, runner), Held(monkeypatch)
        stream = submitted(driver, Request(1, PROMPT, 4))
        assert held.begun.wait(PATIENCE_SECONDS)
        leaving = threading.Thread(target=leave, args=(thread, driver, stream))
        leaving.start()
        wait_until(lambda: 1 in driver.engine._pipeline.cancels)
        held.goes.set()
        leaving.join()
        with suppress(EngineStopped):
            assert driver.call(lambda engine: engine.idle)
    assert held.ops == HELD
    assert driver.engine.idle
    driver.engine.memory.check([])


def test_the_step_goes_on_for_others(runner, monkeypatch):
    """Who stays gets the answer of one who is alone."""
    leaves, stays = (Request(number, PROMPT[number : number + 12], 4) for number in (1, 2))
    alone = Engine(runner)
    alone.submit(stays)
    expected = [event.token for event in alone.run()]
    with EngineThread() as thread:
        driver, held = driver_on(thread, runner), Held(monkeypatch)
        stream = submitted(driver, leaves, stays)
        assert held.begun.wait(PATIENCE_SECONDS)
        stream.cancel(leaves.id)
        held.goes.set()
        tokens: list[int] = []
        while len(tokens) < len(expected):
            taken = [one.event for one in stream.take(PATIENCE_SECONDS)]
            tokens += [event.token for event in taken if event.request_id == stays.id]
    assert tokens == expected
    assert held.ops > 10 * HELD


def test_a_complete_answer_abandons_nothing(runner, monkeypatch):
    """Its text ended it, and whoever read it leaves then: the next prompt may continue it."""
    with EngineThread() as thread:
        driver, held = driver_on(thread, runner), Held(monkeypatch)
        stream = submitted(driver, Request(1, PROMPT, 4))
        assert held.begun.wait(PATIENCE_SECONDS)
        stream.end(1, 0)
        stream.cancel()
        stream.release([1])
        held.goes.set()
        assert driver.call(lambda engine: engine.idle)
    assert held.ops > 10 * HELD
    assert not stream.facts
