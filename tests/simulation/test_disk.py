"""Schedules with a disk cache: who finds what on disk, and what a fault or an interrupt leaves."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from contract.types import QosClass, Request, Tenant
from harness.simulation import disk, history
from harness.simulation.disk import SimulatedDisk
from harness.simulation.drive import Outcome, play
from harness.simulation.generate import ADVERSARY, generate
from harness.simulation.invariants import Invariant
from harness.simulation.schedule import (
    Action,
    Arrive,
    Cancel,
    FailCopy,
    Fault,
    Interrupt,
    Pause,
    Prefix,
    Quota,
    Remove,
    Restart,
    Schedule,
    Stall,
    keep,
    parse_actions,
)
from reference.engine import Engine
from reference.engine.disk_pages import DiskPages
from reference.engine.sequence import Sequence

TENANT, OTHER = Tenant(1, "one"), Tenant(2, "other")
GROUPED = replace(TENANT, isolation_group=7)
BASE = generate(0, ADVERSARY).shape
SHAPE = replace(
    BASE, limits=replace(BASE.limits, step_tokens=36, step_rows=36), chunk_tokens=32, models=1,
    room=1, stall_steps=99, guesses=False, disk=True, prefix_cache=True, cached_pages=None,
    recurrent=False, steps_ahead=1,
)  # fmt: skip
PROMPT = tuple(range(40))
MOVES = {
    "alone": (TENANT, (Quota(0, GROUPED), Quota(0, TENANT))),
    "of a group": (GROUPED, (Quota(0, TENANT), Quota(0, GROUPED))),
    "removed": (TENANT, (Remove(0, 1), Quota(0, TENANT))),
    "another's group": (GROUPED, (Quota(0, TENANT), Quota(0, replace(OTHER, isolation_group=7)))),
}
"""How a scope ends and one like it begins."""


@pytest.fixture(autouse=True)
def nothing_is_lost(monkeypatch) -> None:
    monkeypatch.setattr(history, "NON_FINITE_ONE_IN", 1 << 62)
    monkeypatch.setattr(disk, "LOST_ONE_IN", 1 << 62)


def ask(step: int, number: int, tenant: int = 1, tokens: int = 2) -> Arrive:
    prompt = (*PROMPT, number)
    return Arrive(step, Request(number, prompt, tokens, tenant=tenant, ignore_end=True))


def played(tenant: Tenant, *actions: Action) -> Outcome:
    """Play a schedule, before the end of which all requests end."""
    return play(Schedule(0, SHAPE, (tenant, OTHER), (*actions, Pause(100, 0.0))))


@pytest.mark.parametrize("what", MOVES)
@pytest.mark.parametrize("restarts", [(), (0,), (0, 1), (0, 1, 2)])
def test_nobody_finds_what_a_scope_left_that_ended(what, restarts):
    """Also where its model was not loaded when it ended, and processes ended before and after."""
    tenant, moves = MOVES[what]
    parts: list[Action] = [replace(move, step=20 + number) for number, move in enumerate(moves)]
    for place in reversed(restarts):
        parts.insert(place, Restart(20))
    asks = [ask(40, 2), ask(40, 3, tenant=2)]
    outcome = played(tenant, ask(0, 1), *(replace(part, step=20) for part in parts), *asks)
    assert outcome.violation is None, outcome.violation
    assert outcome.counts["disk written"] > 0
    assert outcome.counts["disk read"] == 0


def test_who_stays_finds_what_was_computed_before_a_restart():
    outcome = played(GROUPED, ask(0, 1), Restart(20), ask(40, 2))
    assert outcome.violation is None
    assert outcome.counts["disk read"] > 0


@pytest.mark.parametrize("what", MOVES)
def test_a_scope_that_is_not_forgotten_is_found(what, monkeypatch):
    """Control. Where another has the number, the names on disk protect all the same."""
    monkeypatch.setattr(SimulatedDisk, "forget", lambda self, scope: None)
    tenant, moves = MOVES[what]
    moves = tuple(replace(move, step=20) for move in moves)
    outcome = played(tenant, ask(0, 1), Restart(20), *moves, ask(40, 2), ask(40, 3, tenant=2))
    if what == "another's group":
        assert outcome.violation is None
    else:
        assert outcome.violation is not None
        assert outcome.violation.invariant is Invariant.PAGE_ISOLATION


@pytest.mark.parametrize("step", range(3, 12))
def test_what_was_read_for_one_who_moves_away_and_back_is_dropped(step):
    """It waits for a slot, its pages are read, and its scope ends meanwhile."""
    running = (ask(0, 2, tenant=2, tokens=30), ask(0, 3, tenant=2, tokens=30))
    shape = replace(SHAPE, limits=replace(SHAPE.limits, slots=1))
    moves = Quota(60 + step, GROUPED), Quota(60 + step, TENANT)
    actions = ask(0, 1), Restart(50), *(replace(one, step=50) for one in running), ask(51, 4)
    outcome = play(Schedule(0, shape, (TENANT, OTHER), (*actions, *moves)))
    assert outcome.violation is None, outcome.violation


LONG = tuple(range(60))
MEANWHILE: dict[str, Callable[[int], tuple[Action, ...]]] = {
    "cancelled": lambda step: (Cancel(step, 2),),
    "stalled": lambda step: (Stall(step, 2), Stall(step + 2, 2, over=True)),
    "a step fails": lambda step: (Fault(step, "collect"),),
    "a submission fails": lambda step: (Fault(step, "submit"),),
    "a copy fails": lambda step: (FailCopy(step, 0),),
    "its scope ends": lambda step: (Quota(step, GROUPED), Quota(step, TENANT)),
    "removed": lambda step: (Remove(step, 1), Quota(step + 1, TENANT)),
    "a restart": lambda step: (Restart(step),),
    "another class": lambda step: tuple(
        Arrive(step, Request(number, LONG[number:], 3, tenant=2, ignore_end=True))
        for number in (5, 6, 7, 8)
    ),
}
"""Things that happen while request 2 is loaded in its slot."""


@pytest.fixture
def slow(monkeypatch) -> Counter[str]:
    """Counts prompts that are loaded in their slots, one page in many steps."""
    counts = Counter[str]()
    load, drop, clear = DiskPages.load, DiskPages.drop, DiskPages.clear

    def counted_load(pages: DiskPages, sequence: Sequence, *parts: Any) -> Any:
        hit = load(pages, sequence, *parts)
        counts["begun"] += pages.is_loading(sequence)
        return hit

    def counted_drop(pages: DiskPages, sequence: Sequence) -> None:
        counts["dropped"] += pages.is_loading(sequence)
        drop(pages, sequence)

    def counted_clear(pages: DiskPages) -> None:
        counts["dropped"] += len(pages._loading)
        clear(pages)

    monkeypatch.setattr(DiskPages, "load", counted_load)
    monkeypatch.setattr(DiskPages, "drop", counted_drop)
    monkeypatch.setattr(DiskPages, "clear", counted_clear)
    return counts


def meanwhile(tenant: Tenant, *actions: Action) -> Outcome:
    """Play what happens after a restart while request 2 is loaded and another one is answered; at
    the end request 3 asks for the same."""
    first, loaded, again = (
        Arrive(step, Request(number, LONG, 2, tenant=1, ignore_end=True))
        for number, step in ((1, 0), (2, 40), (3, 80))
    )
    other = Arrive(39, Request(4, (7, 8, 9), 50, tenant=2, ignore_end=True))
    return played(tenant, first, Restart(20), other, loaded, *actions, again)


@pytest.mark.parametrize("what", MEANWHILE)
def test_what_happens_while_a_long_prompt_is_loaded(what, slow):
    """In any step. Another request finds the whole prompt on disk or in memory, and no page is
    lost: the simulation looks."""
    low = replace(TENANT, qos=QosClass.BATCH)
    for step in range(41, 56, 2):
        outcome = meanwhile(low, *MEANWHILE[what](step))
        assert outcome.violation is None, f"step {step}: {outcome.violation}"
    assert slow["begun"] > slow["dropped"]
    assert (slow["dropped"] > 0) == (what != "stalled")


@pytest.mark.parametrize("apart", [53, pytest.param(7, marks=pytest.mark.long)])
def test_an_interrupt_while_a_long_prompt_is_loaded(apart, slow):
    """At any line of a step in which it is admitted or loaded: others in each step."""
    for step in range(41, 48):
        for line in range(1 + 5 * (step - 41), 400, apart):
            outcome = meanwhile(TENANT, Interrupt(step, line))
            assert outcome.violation is None, f"line {line} of {step}: {outcome.violation}"
    assert slow["begun"] > slow["dropped"] > 0


def test_one_that_has_aged_waits_for_the_room_of_one_that_is_loaded(monkeypatch):
    """Nothing is computed meanwhile, and what came later has room: it must not pass."""
    monkeypatch.undo()
    kept = parse_actions("19//12,22/109/10,25,32/17/0,33,34/58/14,48/79,58/30,60")
    outcome = play(keep(generate(512100739, ADVERSARY), kept))
    assert outcome.violation is None, outcome.violation


def test_one_beyond_its_quotas_keeps_its_turn_while_its_pages_are_read():
    """Its tenant's next request waits behind it, though it has room."""
    kept = parse_actions("3/1,7//6,10,11//2,18//0")
    outcome = play(keep(generate(624001803, ADVERSARY), kept))
    assert outcome.violation is None, outcome.violation


@pytest.mark.parametrize("step", range(1, 8))
def test_a_copy_that_fails_at_the_end_ends_nothing_else(step):
    """Pages wait to be written when the engine is given back, and one cannot be copied. Nothing is
    reserved for ever: the simulation looks."""
    asks = [Arrive(n, Request(n, tuple(range(n, n + 60)), 3, tenant=1)) for n in range(step + 2)]
    outcome = played(TENANT, *asks[:-2], FailCopy(step, 0), Restart(step), *asks[-2:])
    assert outcome.violation is None, outcome.violation


@pytest.mark.parametrize("what", ["save", "load", "drop"])
def test_a_call_is_repeated_after_the_device_failed(what):
    """A step in flight fails, and the call that finds out is interrupted at any line of its
    recovery: the caller repeats it, and gets nothing of what the device had."""
    line, interrupted = 1, True
    while interrupted:
        outcome = played(
            TENANT, ask(0, 1), ask(0, 2, tokens=30), Prefix(7, 1, "save"),
            Fault(8, "collect"), Interrupt(9, line, call=True), Prefix(9, 1, what),
        )  # fmt: skip
        assert outcome.violation is None, f"line {line}: {outcome.violation}"
        interrupted = outcome.counts["interrupted calls"] > 0
        line += 5
    assert line > 30


def test_a_call_on_a_device_that_failed_is_caught(monkeypatch):
    """Control: an engine that goes on without having recovered."""
    monkeypatch.setattr(Engine, "_repair", lambda self: None)
    with pytest.raises(AssertionError, match="HISTORY"):
        test_a_call_is_repeated_after_the_device_failed("save")
