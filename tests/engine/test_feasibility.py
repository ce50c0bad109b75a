"""A request that can never have room is told so, and holds up nobody."""

from dataclasses import replace

import pytest

from contract.errors import RequestError
from contract.types import FinishReason, QosClass, Request, Tenant, TokenEvent
from reference.engine import Engine
from tests.engine.adversaries import engine_of, until

pytestmark = pytest.mark.usefixtures("finite_logits")

OWNER, OTHER, LATE = (Tenant(id, f"t{id}") for id in (1, 2, 3))


def ends(engine: Engine, clock: object, seconds: float = 120.0) -> dict[int, FinishReason]:
    """Why each request ended within so many seconds."""
    found: dict[int, FinishReason] = {}

    def each(events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                found[event.request_id] = event.finish_reason

    until(engine, clock, seconds, each, lambda: engine.idle)  # type: ignore[arg-type]
    return found


def wide(number: int, pages: int, tokens: int = 4, tenant: int = 1) -> Request:
    prompt = tuple((number * 17 + i) % 1000 for i in range(16 * pages - tokens))
    return Request(number, prompt, tokens, tenant=tenant, ignore_end=True)


@pytest.mark.parametrize("waits", [0.0, 11.0])
def test_pages_reserved_later_end_what_can_never_fit(waits):
    """It waits, aged or not, while another tenant reserves what it would need."""
    engine, clock = engine_of(OWNER, OTHER, LATE, slots=2, pages=12)
    engine.submit(wide(1, 4, tokens=30, tenant=2))
    engine.step()
    engine.submit(wide(2, 10))
    engine.step()
    clock.advance(waits)
    for number in (3, 4):
        engine.submit(wide(number, 2, tenant=3))
    engine.put_tenant(replace(OTHER, reserved_pages=5))
    found = ends(engine, clock)
    assert engine.idle
    assert found.pop(2) is FinishReason.ERROR
    assert found == dict.fromkeys((1, 3, 4), FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("slots", "runs", "asked", "reserved"),
    [(2, 4, 7, (5,)), (2, 4, 10, (5, 0)), (1, 1, 10, (5, 0))],
)
def test_what_has_room_or_has_it_again_in_time_is_served(slots, runs, asked, reserved):
    """Beside one that runs: in what reservations leave, and where one is taken back before the
    request has ended, another slot free or not."""
    engine, clock = engine_of(OWNER, OTHER, slots=slots, pages=12)
    engine.submit(wide(1, runs, tokens=min(30, 16 * runs - 1), tenant=2))
    if slots > 1:
        engine.step()
    engine.submit(wide(2, asked))
    for pages in reserved:
        engine.put_tenant(replace(OTHER, reserved_pages=pages))
    assert set(ends(engine, clock).values()) == {FinishReason.LENGTH}


def test_what_can_never_come_back_is_not_admitted_again():
    """However often reservations change: a request that lost its slot ends within a step."""
    engine, _ = engine_of(OWNER, OTHER, LATE, slots=1, pages=8)
    engine.submit(wide(1, 4, tokens=30))
    while engine.progress(1) < 40:
        engine.step()
    engine.put_tenant(replace(OTHER, reserved_pages=5))
    found: dict[int, FinishReason] = {}
    preempted = 0
    for number in range(200):
        engine.put_tenant(replace(LATE, weight=1.0 + number % 2))
        for event in engine.step():
            if event.finish_reason is not None:
                found[event.request_id] = event.finish_reason
        preempted = engine.statistics.preempted
    assert found == {1: FinishReason.ERROR}
    assert engine.idle
    assert (preempted, engine.statistics.admitted) == (1, 1)


def test_one_that_runs_keeps_what_it_has_and_is_told_when_it_lost_it():
    """A reservation takes nothing from anybody; what is preempted and can never come back ends."""
    hurried = Tenant(4, "hurried", qos=QosClass.INTERACTIVE)
    engine, clock = engine_of(replace(OWNER, qos=QosClass.BATCH), OTHER, hurried, slots=1, pages=12)
    engine.submit(wide(1, 10, tokens=20))
    while not engine.progress(1):
        engine.step()
    engine.put_tenant(replace(OTHER, reserved_pages=5))
    engine.step()
    assert engine.statistics.running == 1
    engine.submit(wide(2, 1, tenant=4))
    found = ends(engine, clock)
    assert found == {1: FinishReason.ERROR, 2: FinishReason.LENGTH}


def test_a_tenant_that_comes_with_a_reservation():
    engine, clock = engine_of(OWNER, slots=2, pages=12)
    engine.submit(wide(1, 6, tokens=40))
    engine.step()
    engine.submit(wide(2, 10))
    engine.replace_tenants([OWNER, replace(OTHER, reserved_pages=5)])
    assert ends(engine, clock) == {1: FinishReason.LENGTH, 2: FinishReason.ERROR}
    with pytest.raises(RequestError, match="needs 10 KV pages, there are 7"):
        engine.submit(wide(3, 10))


def test_a_stalled_client_does_not_hold_up_an_aged_request():
    """Nothing is computed for who takes no tokens, so its pages are there for who waits."""
    engine, clock = engine_of(OWNER, OTHER, LATE, slots=2, pages=12, stall_steps=100_000)
    engine.submit(wide(1, 6, tokens=40, tenant=2))
    engine.step()
    engine.step()
    engine.stall(1)
    engine.submit(wide(2, 10))
    clock.advance(11)
    engine.submit(wide(3, 2, tenant=3))
    found = ends(engine, clock, 60)
    assert found == dict.fromkeys((2, 3), FinishReason.LENGTH)
    engine.unstall(1)
    assert ends(engine, clock, 60) == {1: FinishReason.LENGTH}


def test_without_a_look_at_what_waits_the_engine_is_blocked(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(
        "reference.engine.scheduler.Scheduler._can_ever_fit", lambda self, sequence: True
    )
    engine, clock = engine_of(OWNER, OTHER, LATE, slots=2, pages=12)
    engine.submit(wide(2, 10))
    engine.put_tenant(replace(OTHER, reserved_pages=5))
    clock.advance(11)
    engine.submit(wide(3, 2, tenant=3))
    assert ends(engine, clock) == {}


def test_who_takes_no_tokens_holds_up_nobody_however_long_it_waits():
    """A request that waits, is aged and has no room, and whose consumer takes nothing: others pass
    it, of its own tenant too; when the consumer takes tokens again it is admitted and ends."""
    engine, clock = engine_of(OWNER, OTHER, LATE, slots=2, pages=12, stall_steps=100_000)
    engine.submit(Request(1, tuple(range(90)), 20, tenant=OWNER.id, ignore_end=True))
    engine.step()
    engine.stall(1)
    engine.submit(Request(2, tuple(range(100, 200)), 20, tenant=OTHER.id, ignore_end=True))
    engine.stall(2)
    clock.advance(60.0)
    engine.submit(Request(3, (7,) * 3, 4, tenant=LATE.id, ignore_end=True))
    engine.submit(Request(4, (8,) * 3, 4, tenant=OTHER.id, ignore_end=True))
    ended = set()
    for _ in range(60):
        ended |= {e.request_id for e in engine.step() if e.finish_reason is not None}
        clock.advance(0.1)
    assert ended == {3, 4}
    engine.unstall(1)
    engine.unstall(2)
    for event in engine.run():
        assert event.finish_reason is None or event.finish_reason is FinishReason.LENGTH
        ended |= {event.request_id} if event.finish_reason is not None else set()
    assert ended == {1, 2, 3, 4}
