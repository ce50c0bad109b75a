"""What is counted as handed out is what was handed out."""

from __future__ import annotations

from contract.types import Request
from harness.simulation.clock import VirtualClock
from harness.simulation.runner import SimulatedRunner
from reference.engine import Engine
from reference.limits import Limits


def test_a_request_for_logits_alone_generates_nothing() -> None:
    """A row of logits is sampled like any other; nobody gets the token."""
    engine = Engine(SimulatedRunner(Limits(1, 32, 2, step_tokens=9), VirtualClock()))
    engine.submit(Request(1, (7, 8, 9), 0), lambda start, logits: None)
    (event,) = engine.run()
    assert event.token == -1
    assert engine.ledger.of(0).tokens_generated == 0
