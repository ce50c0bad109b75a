"""Steps in which the same sequences decode on: made of the step before, not planned anew."""

from typing import Any

import pytest

from contract.types import Request
from harness.simulation.clock import VirtualClock
from harness.simulation.history import solo_run
from harness.simulation.runner import SimulatedRunner
from reference.engine import Engine
from reference.limits import Limits
from reference.sched.planner import plan_step


def request(number: int, length: int, tokens: int) -> Request:
    return Request(number, tuple(range(number, number + length)), tokens, ignore_end=True)


def play(limits: Limits, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks each planned step had; every request got the tokens it gets alone."""
    clock = VirtualClock()
    runner = SimulatedRunner(limits, clock)
    runner.slot_scopes = [0] * limits.slots
    engine = Engine(runner, clock=clock)
    planned: list[int] = []

    def counted(pending: Any, chunk_tokens: int) -> Any:
        chunks = plan_step(pending, chunk_tokens)
        planned.append(len(chunks))
        return chunks

    monkeypatch.setattr("reference.engine.scheduler.plan_step", counted)
    for one in requests:
        engine.submit(one)
    events = list(engine.run())
    for one in requests:
        alone = solo_run(one, limits.context).events
        assert tuple(event for event in events if event.request_id == one.id) == alone
    return planned


def test_steps_are_planned_when_somebody_joins_or_leaves(monkeypatch):
    """Not where a sequence begins a page."""
    limits = Limits(slots=3, context=128, pages=24, recent_tokens=16, step_tokens=67, step_rows=3)
    requests = [request(100 * n, 10 + 5 * n, 50 + 20 * n) for n in range(1, 4)]
    planned = play(limits, requests, monkeypatch)
    assert planned.count(3) <= 3
    assert len(planned) <= 12


def test_who_finds_no_page_for_a_steady_step_makes_room(monkeypatch):
    """One of two leaves, and goes on later from where it was."""
    limits = Limits(slots=2, context=96, pages=7, recent_tokens=16, step_tokens=66, step_rows=2)
    planned = play(limits, [request(200, 20, 60), request(300, 24, 60)], monkeypatch)
    assert planned.count(1) >= 2
