"""An engine that is left with events nobody took: its usage counts what was handed out."""

import pytest

from contract.types import FinishReason, Request
from harness.simulation.clock import VirtualClock
from harness.simulation.runner import SimulatedRunner
from reference.engine import Engine, EngineOptions
from reference.limits import Limits
from tests.engine.test_faults import CONTEXT, Interrupt, assert_all_given_back

pytestmark = pytest.mark.usefixtures("finite_logits")

REQUESTS = (
    Request(1, tuple(range(20)), 4, ignore_end=True),
    Request(2, tuple(range(30, 40)), 7, ignore_end=True),
    Request(3, tuple(range(50, 60)), 2, ignore_end=True),
)


def engine_with_requests() -> Engine:
    clock = VirtualClock()
    runner = SimulatedRunner(Limits(2, CONTEXT, 20, step_tokens=34), clock)
    engine = Engine(runner, EngineOptions(steps_ahead=1), clock=clock)  # type: ignore[arg-type]
    for request in REQUESTS:
        engine.submit(request)
    return engine


def assert_ledger_counts(engine: Engine, tokens: int, ended: int) -> None:
    counted = engine.usage.of(0)
    assert counted.tokens_generated == tokens
    assert counted.requests_finished.get(FinishReason.LENGTH, 0) == ended


@pytest.mark.parametrize("steps", range(7))
def test_events_that_were_counted_and_not_taken_are_counted_no_more(steps):
    engine = engine_with_requests()
    taken = [event for _ in range(steps) for event in engine.step()]
    engine.advance()
    assert engine.has_events
    engine.abandon()
    ended = [event for event in taken if event.finish_reason is not None]
    assert not engine.has_events
    assert_ledger_counts(engine, len(taken), len(ended))
    assert_all_given_back(engine)


def left_after_an_interrupt(line: int, steps: int) -> bool:
    """Leave an engine after an interrupt before a line of a step. Whether the step had so many."""
    engine = engine_with_requests()
    taken = [event for _ in range(steps) for event in engine.step()]
    try:
        taken += Interrupt(line).during(engine.step)
        came = False
    except KeyboardInterrupt:
        came = True
    engine.abandon()
    ended = [event for event in taken if event.finish_reason is not None]
    assert_ledger_counts(engine, len(taken), len(ended))
    assert_all_given_back(engine)
    return came


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
def test_an_interrupt_at_any_line_before_it_is_left(steps):
    line = 1 + steps % 2
    while left_after_an_interrupt(line, steps):
        line += 3
    assert line > 200
