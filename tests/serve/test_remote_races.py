"""Messages of an engine's process that cross its end, the end of a model, or a cancellation."""

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from contract.types import LOCAL_TENANT, Request
from harness.host.engine_thread import EngineThread
from harness.host.remote.channel import Channel, ChannelEnded
from harness.host.remote.messages import Start, Step
from harness.host.remote.process import WORDS, EngineProcess
from harness.host.remote.server import EngineServer
from harness.host.remote.step_driver import StepDriver
from harness.host.remote.work import Job, Work
from harness.host.structured.grammars import Grammars
from harness.host.submissions import EngineStopped
from reference.engine import Engine
from reference.engine.models import Models
from reference.limits import Limits
from reference.model.open import open_model
from reference.runner import ModelRunner
from tests.named_tiers import quick_tier
from tests.patience import wait_until

LIMITS = Limits(slots=2, context=96, pages=12, step_tokens=32, step_rows=4)
Driven = tuple[StepDriver, Grammars, list[Any]]


@pytest.fixture
def driven(tiny_model_path) -> Iterator[Driven]:
    """A driver whose messages are kept in a list."""
    sent: list[Any] = []
    model = open_model(tiny_model_path)
    with ExitStack() as owned:
        owned.enter_context(model.file)
        runner = owned.enter_context(ModelRunner(model, owned.enter_context(quick_tier()), LIMITS))
        thread = EngineThread(driver_of=partial(StepDriver, sent.append))
        driver = owned.enter_context(thread).add(lambda seen: Engine(runner, observer=seen))
        owned.callback(driver.close)
        assert isinstance(driver, StepDriver)
        yield driver, Grammars(model.tokenizer, model.config.vocab), sent


def test_a_submission_that_is_cancelled_before_any_step_is_answered(driven):
    """Nothing is left to step then, and who submitted waits for the answer."""
    driver, grammars, sent = driven
    held = threading.Event()
    driver._post(held.wait)
    driver.accept(7, [[Job(Work(Request(1, (40, 41), 4)), grammars)]])
    driver.cancel(driver.stream, [1])
    held.set()
    wait_until(lambda: [(7, [None])] in [one.answers for one in sent if isinstance(one, Step)])


class _Leaving(dict[str, Any]):
    """Models of which one is unloaded once somebody has looked whether it is there."""

    def __contains__(self, key: object) -> bool:
        return True


@pytest.mark.parametrize(
    ("method", "arguments"), [("cancel", ([1], 3, True)), ("stall", ([1],)), ("resume", ([1],))]
)
def test_messages_about_a_model_that_is_just_unloaded_are_ignored(method, arguments):
    """An error would end the process, and with it the answers of all other models."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        server = EngineServer(channel, Start((LOCAL_TENANT,), WORDS, None, 0))
        server._models = _Leaving()
        getattr(server, method)("0", *arguments)
        server._thread.close()
        ours.close()
        with pytest.raises(ChannelEnded):
            channel.receive()


def test_a_child_that_ends_while_it_is_told_of_the_tenants_is_an_engine_that_stopped(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    many = [replace(LOCAL_TENANT, id=one, name=f"{one:0200}") for one in range(20_000)]
    with (
        EngineProcess(lambda: many) as engines,
        pytest.raises(EngineStopped, match="the engine's process ended"),
    ):
        engines.call(Models.longest_idle, ())
