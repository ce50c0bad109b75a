"""Requests begin: those that come together in one step, and none waits for one that never comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from contract.types import Request
from harness.host import engine_thread
from harness.host.driver import EventStream
from harness.host.engine_thread import EngineThread, ThreadedDriver
from harness.host.submissions import EngineStopped, Submission
from harness.serve.drawn import DRAWN_BYTES, random_bits, random_bytes
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import open_model
from reference.observer import Observer, StepObservation
from reference.runner import ModelRunner
from tests.null_tier import NullTier
from tests.patience import PATIENCE_SECONDS

SLOTS = 8
LIMITS = Limits(slots=SLOTS, context=96, pages=48, step_tokens=96, step_rows=SLOTS)


class Steps(Observer):
    """Notes how many sequences each step has."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def step(self, step: StepObservation) -> None:
        self.sizes.append(len(step.requests))


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def driver(tiny_model_path: Path, steps: Steps) -> Iterator[ThreadedDriver]:
    model = open_model(tiny_model_path)

    def make(observer: Observer) -> Engine:
        observer.then = steps  # type: ignore[attr-defined]
        return Engine(runner, EngineOptions(), observer=observer)

    with (
        model.file,
        NullTier(65) as tier,
        ModelRunner(model, tier, LIMITS) as runner,
        EngineThread() as thread,
    ):
        yield thread.add(make)


def begin(driver: ThreadedDriver) -> EventStream:
    return driver.submit([Request(driver.new_id(), (40, 41), 4, ignore_end=True)])


def last_of(stream: EventStream) -> Any:
    """The event that ends a stream of one request."""
    while True:
        for _, event in stream.take(PATIENCE_SECONDS):
            if event.finish_reason is not None:
                return event


def test_requests_that_come_together_begin_together(
    driver: ThreadedDriver, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "GATHER_SECONDS", PATIENCE_SECONDS)
    driver._thread.arrived = lambda: SLOTS
    with ThreadPoolExecutor(SLOTS) as threads:
        for stream in threads.map(begin, [driver] * SLOTS):
            last_of(stream)
    assert steps.sizes[0] == SLOTS


def test_nobody_waits_long_for_a_request_that_does_not_come(
    driver: ThreadedDriver, steps: Steps
) -> None:
    driver._thread.arrived = lambda: SLOTS
    last_of(begin(driver))
    assert steps.sizes[0] == 1


def test_a_request_that_waits_for_a_slot_has_begun(
    driver: ThreadedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream is there before its first event, so that its client can be looked after."""
    monkeypatch.setattr(engine_thread, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(driver.engine, "step", list)
    stream = begin(driver)
    assert not stream._first
    stream.cancel()
    assert driver.call(lambda engine: engine.idle)


def test_work_posted_in_the_last_turn_gets_the_reason(driver: ThreadedDriver) -> None:
    """No stream is left that nobody ends."""
    stream = driver.open_stream()
    submission = Submission([Request(driver.new_id(), (40,), 4)])
    refused: list[BaseException] = []

    def ask() -> None:
        try:
            driver.begin(stream, submission)
        except EngineStopped as error:
            refused.append(error)

    asker = threading.Thread(target=ask)

    def end_while_one_is_posted(engine: Engine) -> None:
        asker.start()
        while not driver.posted:
            pass
        driver.end(EngineStopped("over"))

    driver.call(end_while_one_is_posted)
    asker.join()
    assert [str(error) for error in refused] == ["over"]
    assert not driver._streams


def test_an_engine_that_ends_after_it_accepted_fails_the_stream(driver: ThreadedDriver) -> None:
    """The request has begun: it fails as one that had events does."""
    stream = driver.open_stream()
    accept = driver._begin

    def accept_and_end(engine: Engine, *arguments: Any) -> None:
        accept(engine, *arguments)
        driver.end(EngineStopped("over"))

    driver._begin = accept_and_end  # type: ignore[method-assign]
    driver.begin(stream, Submission([Request(driver.new_id(), (40,), 4)]))
    with pytest.raises(EngineStopped, match="over"):
        stream.take(PATIENCE_SECONDS)


def test_random_numbers_are_drawn_once() -> None:
    """Over the end of what was drawn together, and in whole and parts of bytes."""
    drawn = [random_bytes(12) for _ in range(DRAWN_BYTES // 4)]
    assert len(set(drawn)) == len(drawn)
    assert {len(one) for one in drawn} == {12}
    numbers = [random_bits(53) for _ in range(1000)]
    assert max(numbers) < 1 << 53
    assert max(numbers).bit_length() > 48
    assert len(set(numbers)) == len(numbers)
