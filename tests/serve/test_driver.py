"""The thread that owns the engine: commands, streams, stalls, faults, ends."""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from contract.errors import DeviceLost, PromptTooLong, QueueFull, RequestError
from contract.types import LOCAL_TENANT, FinishReason, Request
from harness.host.driver import EngineDriver
from harness.host.engine_thread import EngineThread
from harness.host.event_queue import EventQueue
from harness.host.stream_driver import EventStream
from harness.host.submissions import EngineStopped, Submission
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import open_model
from reference.observer import Observer
from reference.runner import ModelRunner
from tests.held_steps import hold_steps
from tests.named_tiers import quick_tier
from tests.patience import PATIENCE_SECONDS, wait_until

LIMITS = Limits(slots=2, context=96, pages=12, step_tokens=32, step_rows=4)
Driven = Callable[..., Any]


@pytest.fixture(scope="module")
def runner(tiny_model_path) -> Iterator[ModelRunner]:
    model = open_model(tiny_model_path)
    with model.file, quick_tier() as tier, ModelRunner(model, tier, LIMITS) as runner:
        yield runner


@pytest.fixture
def driven(runner) -> Driven:
    @contextmanager
    def start(buffered: int = 256, engine: type[Engine] = Engine, **options: Any) -> Iterator[Any]:
        def make(observer: Observer) -> Engine:
            return engine(runner, EngineOptions(**options), observer=observer)

        with EngineThread() as thread:
            driver = thread.add(make, buffered)
            yield driver
            driver.close()

    return start


def request(driver: EngineDriver, max_tokens: int = 4, length: int = 5) -> Request:
    return Request(driver.new_id(), tuple(range(40, 40 + length)), max_tokens, ignore_end=True)


def tokens_of(stream: EventStream) -> list[int]:
    """All tokens of a stream of one request."""
    tokens: list[int] = []
    while True:
        for delivered in stream.take(PATIENCE_SECONDS):
            tokens.append(delivered.event.token)
            if delivered.event.finish_reason is not None:
                return tokens


def test_refusals_reach_the_caller_and_leave_nothing(driven, monkeypatch):
    """Of requests that belong together all are taken, or none."""
    steps = hold_steps(monkeypatch)
    with driven(queue_depth=1) as driver:
        with pytest.raises(RequestError) as refused:
            driver.submit([request(driver), request(driver, length=200)])
        assert refused.value.field == "prompt"
        assert driver.call(lambda engine: engine.idle)
        streams = []
        for running in (1, 2):
            streams.append(driver.submit([request(driver, 80)]))
            steps.allow(5)
            wait_until(lambda n=running: driver.call(lambda e: e.statistics.running) == n)
        streams.append(driver.submit([request(driver, 80)]))
        with pytest.raises(QueueFull):
            driver.submit([request(driver)])
        for stream in streams:
            stream.cancel()
        assert driver.call(lambda engine: engine.idle)


def test_what_the_driver_notes_of_a_request(driven):
    with driven() as driver:
        for cached in (0, 32):
            one = request(driver, length=40)
            stream = driver.submit([one])
            tokens_of(stream)
            facts = stream.facts[one.id]
            assert facts.admitted is not None
            assert facts.admitted >= facts.submitted
            assert facts.cached == cached


def test_nothing_is_computed_for_a_stream_nobody_takes_from(driven):
    """It holds what fits and little more, another goes on, and when taken from it is whole."""
    with driven(buffered=4, stall_steps=10**6) as driver:
        alone = tokens_of(driver.submit([request(driver, 60)]))
        stalled = driver.submit([request(driver, 60)])
        other = tokens_of(driver.submit([request(driver, 60)]))
        assert other == alone
        assert len(stalled._events) < 8
        assert tokens_of(stalled) == alone


def test_who_stalls_too_long_is_ended_though_nobody_else_is_there(driven):
    with driven(buffered=4, stall_steps=5) as driver:
        stream = driver.submit([request(driver, 60)])
        while not driver.call(lambda engine: engine.idle):
            time.sleep(0.01)
        assert tokens_of(stream)[-1] == -1
        usage = driver.call(lambda engine: engine.usage.of(0).requests_finished)
        assert usage == {FinishReason.CLIENT_TOO_SLOW: 1}


class TakenMeanwhile(EventQueue):
    """A queue that another thread empties once, just after the engine has counted its events for
    the time number ``count`` and found at least ``full``."""

    def __init__(self, full: int, count: int, take: Callable[[], None]) -> None:
        super().__init__()
        self._full, self._left, self._take = full, count, take

    def __len__(self) -> int:
        events = super().__len__()
        if events >= self._full and threading.current_thread().name == "engine":
            self._left -= 1
            if not self._left:
                reader = threading.Thread(target=self._take)
                reader.start()
                reader.join()
        return events


@pytest.mark.parametrize("count", [1, 2])
def test_a_stream_emptied_while_it_is_found_full_goes_on(driven, count):
    """A reader that takes events when it is called is called again: the engine waits for one that
    has events to take."""
    with driven(buffered=4, stall_steps=10**6) as driver:
        alone = tokens_of(driver.submit([request(driver, 20)]))
        tokens: list[int] = []
        arrived = threading.Event()
        stream = driver.open_stream(ready=arrived.set)

        def take() -> None:
            arrived.clear()
            tokens.extend(delivered.event.token for delivered in stream.take(0.0))

        stream._events = TakenMeanwhile(4, count, take)
        driver.submit_to(stream, [Submission([request(driver, 20)])])
        wait_until(lambda: len(tokens) >= 4 or driver.call(lambda engine: stream._stalled))
        while len(tokens) < len(alone):
            assert arrived.wait(PATIENCE_SECONDS)
            take()
        assert tokens == alone


class FailingOnce(Engine):
    """An engine one step of which fails."""

    steps = 0

    def step(self) -> list[Any]:
        self.steps += 1
        if self.steps == 3:
            try:
                raise RuntimeError("a step failed")
            except RuntimeError as error:
                self._recover(True)
                raise error
        return super().step()


def test_a_failed_step_is_survived(driven):
    """The request goes on with the tokens it has, and they are the same."""
    with driven() as driver:
        alone = tokens_of(driver.submit([request(driver, 10)]))
    with driven(engine=FailingOnce) as driver:
        assert tokens_of(driver.submit([request(driver, 10)])) == alone
        assert driver.failure is None


class Losing(Engine):
    """An engine whose device goes away."""

    def step(self) -> list[Any]:
        raise DeviceLost("gone")


def test_a_lost_device_ends_everybody(driven):
    """Who waits is told, and so is who comes later."""
    with driven(engine=Losing) as driver:
        stream = driver.submit([request(driver)])
        with pytest.raises(EngineStopped, match="device was lost"):
            tokens_of(stream)
        with pytest.raises(EngineStopped):
            driver.submit([request(driver)])
        with pytest.raises(EngineStopped):
            driver.call(lambda engine: engine.idle)
        assert "device was lost" in driver.failure


def test_one_stream_for_many_submissions(driven):
    """What is refused is told apart, and takes nothing from the others; the stream says when there
    is something to take."""
    told = threading.Event()
    with driven() as driver:
        stream = driver.open_stream(ready=told.set)
        first, second, wrong = request(driver, 3), request(driver, 5), request(driver, 3, 200)
        refused = driver.submit_to(
            stream, [Submission([first]), Submission([wrong]), Submission([second])]
        )
        assert [type(error) for error in refused] == [type(None), PromptTooLong, type(None)]
        assert set(stream.facts) == {first.id, second.id}
        tokens: dict[int, list[int]] = {first.id: [], second.id: []}
        ends = 0
        while ends < 2:
            assert told.wait(PATIENCE_SECONDS)
            told.clear()
            for delivered in stream.take(0):
                tokens[delivered.event.request_id].append(delivered.event.token)
                ends += delivered.event.finish_reason is not None
        assert [len(tokens[one.id]) for one in (first, second)] == [3, 5]
        for one in (first, second):
            alone = replace(one, id=driver.new_id())
            assert tokens_of(driver.submit([alone])) == tokens[one.id]


def test_a_released_request_is_forgotten_and_the_others_go_on(driven, monkeypatch):
    """In the middle of its answer: the engine, which may have events of it, does not stumble."""
    steps = hold_steps(monkeypatch, 5)
    with driven() as driver:
        stream = driver.open_stream()
        first, second = request(driver, 60), request(driver, 20)
        assert driver.submit_to(stream, [Submission([first]), Submission([second])]) == [None, None]
        assert stream.take(PATIENCE_SECONDS)
        stream.release([first.id])
        steps.allow()
        assert driver.call(lambda engine: set(stream.facts)) == {second.id}
        ended: list[int] = []
        while not ended:
            ended = [
                one.event.request_id
                for one in stream.take(PATIENCE_SECONDS)
                if one.event.finish_reason
            ]
        assert ended == [second.id]
        assert driver.failure is None
        assert driver.call(lambda engine: engine.idle)


def interrupted_at(event_number: int, work: Callable[[], object]) -> bool:
    """Do ``work`` and raise KeyboardInterrupt when it enters or leaves a function of Python, as a
    signal's handler may; whether it did so ``event_number`` times before."""
    seen = itertools.count()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if event in ("call", "return") and next(seen) == event_number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def still_answers(thread: EngineThread) -> bool:
    """Whether the thread still does what another one asks, three times."""
    answers: list[int] = []

    def ask() -> None:
        answers.extend(thread.call(lambda models, one=one: one) for one in range(3))

    caller = threading.Thread(target=ask, daemon=True)
    caller.start()
    caller.join(PATIENCE_SECONDS)
    return answers == [0, 1, 2]


def test_an_interrupt_anywhere_in_a_call_stops_no_later_one():
    """Ctrl-C in the main thread leaves no lock held, and the engine's thread takes more work."""
    number = 0
    interrupted = True
    while interrupted:
        thread = EngineThread()
        interrupted = interrupted_at(number, lambda t=thread: t.call(lambda models: None))
        assert still_answers(thread), f"interrupted at event {number}"
        thread.close()
        number += 1
    assert number > 10


def test_what_a_removed_tenant_did_not_use_is_taken_from_no_other(driven, monkeypatch):
    """An answer ends early when another tenant has got the id of its own already."""
    held = hold_steps(monkeypatch, 12)
    with driven() as driver:
        stream = driver.submit([request(driver, 80)])
        (number,) = stream.facts
        wait_until(lambda: driver.call(lambda engine: stream.facts[number].tokens) > 4)

        def exchange(engine: Engine) -> int:
            engine.begin_removal(LOCAL_TENANT.id)
            engine.put_tenant(replace(LOCAL_TENANT, name="another"))
            return engine.usage.of(LOCAL_TENANT.id).tokens_generated

        assert driver.call(exchange) == 0
        theirs = driver.submit([request(driver, 7)])
        stream.cancel(number, 1)
        held.allow()
        assert len(tokens_of(theirs)) == 7
        assert driver.call(lambda engine: engine.usage.of(LOCAL_TENANT.id).tokens_generated) == 7
