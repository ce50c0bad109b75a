"""What is counted as handed out is what was handed out."""

import pytest

from contract.errors import DeviceLost
from contract.types import FinishReason, Request
from harness.simulation.clock import VirtualClock
from harness.simulation.runner import SimulatedRunner
from reference.engine import Engine, EngineOptions
from reference.limits import Limits


def test_a_request_for_logits_alone_generates_nothing():
    """A row of logits is sampled like any other; nobody gets the token."""
    engine = Engine(SimulatedRunner(Limits(1, 32, 2, step_tokens=9), VirtualClock()))
    engine.submit(Request(1, (7, 8, 9), 0), lambda start, logits: None)
    (event,) = engine.run()
    assert event.token == -1
    assert engine.usage.of(0).tokens_generated == 0


def test_an_end_is_told_before_a_step_can_fail():
    """Else its client could cancel, and the end would follow."""
    runner = SimulatedRunner(Limits(2, 32, 4, step_tokens=9), VirtualClock())
    engine = Engine(runner, EngineOptions(stall_steps=1, steps_ahead=0))
    engine.submit(Request(1, (7,), 9, ignore_end=True))
    engine.submit(Request(2, (8,), 9, ignore_end=True))
    engine.step()
    engine.stall(1)
    engine.step()
    runner.fail_next("submit")
    (event,) = engine.step()
    assert event.finish_reason is FinishReason.CLIENT_TOO_SLOW
    with pytest.raises(DeviceLost):
        engine.step()
    engine.cancel(1)
    assert {event.request_id for event in engine.run()} == {2}


def test_cancel_takes_back_events_that_a_sink_held_up():
    """A sink that raises ends the step before its events are given away."""
    engine = Engine(
        SimulatedRunner(Limits(2, 32, 4, step_tokens=9), VirtualClock()),
        EngineOptions(steps_ahead=0),
    )

    def sink(start: int, logits: object) -> None:
        if start == 1:
            raise OSError("a sink failed")

    engine.submit(Request(1, (7,), 9, ignore_end=True))
    engine.submit(Request(2, (8,), 9, ignore_end=True), sink)
    engine.step()
    with pytest.raises(OSError, match="a sink failed"):
        engine.step()
    engine.cancel(1)
    engine.cancel(2)
    assert engine.step() == []
