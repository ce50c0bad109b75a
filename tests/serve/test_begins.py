"""The time between a request's submission and its first event."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from contract.types import Request
from harness.host import stream_driver
from harness.host.engine_thread import EngineThread
from harness.host.stream_driver import EventStream
from harness.host.submissions import EngineStopped, Submission
from harness.host.threaded_driver import ThreadedDriver
from harness.serve.random_pool import DRAWN_BYTES, random_bits, random_bytes
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from reference.model.open import open_model
from reference.observer import Observer
from reference.runner import ModelRunner
from tests.null_tier import NullTier
from tests.patience import PATIENCE_SECONDS

LIMITS = Limits(slots=2, context=96, pages=12, step_tokens=96, step_rows=2)


@pytest.fixture
def driver(tiny_model_path) -> Iterator[ThreadedDriver]:
    model = open_model(tiny_model_path)

    def make(observer: Observer) -> Engine:
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


def test_a_request_that_waits_for_a_slot_has_begun(driver, monkeypatch):
    """Its stream is there before its first event, so that its client can be looked after."""
    monkeypatch.setattr(stream_driver, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(driver.engine, "step", list)
    stream = begin(driver)
    assert not stream._first
    stream.cancel()
    assert driver.call(lambda engine: engine.idle)


def test_work_posted_in_the_last_turn_gets_the_reason(driver):
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


def test_an_engine_that_ends_after_it_accepted_fails_the_stream(driver):
    """The request has begun: it fails as one that had events does."""
    stream = driver.open_stream()
    accept = driver._begin

    def accept_and_end(engine: Engine, *arguments: Any) -> None:
        accept(engine, *arguments)
        # Behind what is done now: by then the request is known to be accepted.
        driver._commands.append(lambda: driver.end(EngineStopped("over")))

    driver._begin = accept_and_end  # type: ignore[method-assign]
    driver.begin(stream, Submission([Request(driver.new_id(), (40,), 4)]))
    with pytest.raises(EngineStopped, match="over"):
        stream.take(PATIENCE_SECONDS)


def test_random_numbers_are_drawn_once():
    """Over the end of what was drawn together, and in whole and parts of bytes."""
    drawn = [random_bytes(12) for _ in range(DRAWN_BYTES // 4)]
    assert len(set(drawn)) == len(drawn)
    assert {len(one) for one in drawn} == {12}
    numbers = [random_bits(53) for _ in range(1000)]
    assert max(numbers) < 1 << 53
    assert max(numbers).bit_length() > 48
    assert len(set(numbers)) == len(numbers)
