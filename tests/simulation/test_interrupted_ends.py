"""Interrupts at every line of a step whose events end requests, before what clients and operators
do next: the simulator's promises hold, and it knows which ends are certain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contract.types import Request, Tenant
from harness.simulation.drive import play
from harness.simulation.generate import ADVERSARY, generate
from harness.simulation.schedule import Action, Arrive, Interrupt, Restart, Schedule, Stall

TENANT = Tenant(1, "one")
SHAPE = replace(generate(0, ADVERSARY).shape, models=1, room=1, stall_steps=1, guesses=False)


def schedule_of(*actions: Action) -> Schedule:
    """A schedule of one tenant's requests, on an engine without a rare setting."""
    return Schedule(0, SHAPE, (TENANT,), actions)


def request(number: int, tokens: int) -> Request:
    prompt = tuple(range(10 * number, 10 * number + 3))
    return Request(number, prompt, tokens, tenant=1, ignore_end=True)


def interrupts(schedule: Schedule, step: int, line: int) -> bool:
    """Play a schedule with an interrupt more. Whether the step has so many lines."""
    actions = sorted((*schedule.actions, Interrupt(step, line)), key=lambda action: action.step)
    outcome = play(replace(schedule, actions=tuple(actions)))
    assert outcome.violation is None, f"line {line}: {outcome.violation}"
    return outcome.counts["interrupts"] > 0


@pytest.mark.parametrize("step", range(2, 5))
def test_a_stall_that_is_over_before_its_end_is_handed_out(step: int) -> None:
    stalled = schedule_of(
        Arrive(0, request(1, 4)),
        Arrive(0, request(2, 9)),
        Stall(1, 1),
        Stall(step + 1, 1, over=True),
    )
    lines = 1 + step % 2
    while interrupts(stalled, step, lines):
        lines += 2
    assert lines > 100


@pytest.mark.parametrize("step", range(1, 5))
def test_a_restart_before_counted_tokens_are_handed_out(step: int) -> None:
    left = schedule_of(
        Arrive(0, request(1, 2)), Arrive(0, request(2, 4)), Arrive(1, request(3, 0)),
        Restart(step + 1),
    )  # fmt: skip
    lines = 1 + step % 2
    while interrupts(left, step, lines):
        lines += 2
    assert lines > 100
