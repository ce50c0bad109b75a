"""Whoever is admitted gets on: a permanent flood of requests that come first starves nobody."""

import pytest

from contract.types import FinishReason, QosClass, Request, Tenant, TokenEvent
from reference.engine import Engine
from reference.sched.quantum import QUANTUM, end_of_quantum, max_turns
from tests.engine.adversaries import Flood, engine_of, until

pytestmark = pytest.mark.usefixtures("finite_logits")

AGING = 10.0
ROOM = 2.0
"""Seconds within which a request of the flood has ended: when there is room at the latest."""


def flooded(
    qos: QosClass, prompt: int, tokens: int, *, seconds: float, **sizes: object
) -> tuple[Engine, float, list[TokenEvent]]:
    """One request of a class beside a flood of interactive ones that could fill every slot for
    ever: the engine, how long it took to end, and its events."""
    engine, clock = engine_of(
        Tenant(1, "flood", qos=QosClass.INTERACTIVE),
        Tenant(2, "victim", qos=qos),
        **sizes,  # type: ignore[arg-type]
    )
    flood = Flood(engine, 1)
    flood.refill()
    engine.submit(Request(1, tuple(range(prompt)), tokens, tenant=2, ignore_end=True))
    own: list[TokenEvent] = []

    def each(events: list[TokenEvent]) -> None:
        own.extend(event for event in events if event.request_id == 1)
        flood.refill(events)

    took = until(engine, clock, seconds, each, lambda: ended(own))
    return engine, took, own


def ended(events: list[TokenEvent]) -> bool:
    return bool(events) and events[-1].finish_reason is not None


def bound(reach: int, tenants: int = 2) -> float:
    """What docs/scheduling.md promises: each turn brings an aged request nearer to its end."""
    step = 0.06
    return max_turns(reach) * (AGING + tenants * ROOM) + 3 * reach * step


CASES = [
    pytest.param({}, id="as it is"), pytest.param({"prefix_cache": False}, id="no cache"),
    pytest.param({"recurrent": True, "saved_states": 4}, id="hybrid"),
    pytest.param({"recurrent": True, "prefix_cache": False}, id="hybrid, no cache"),
    pytest.param({"pages": 20}, id="few pages"), pytest.param({"steps_ahead": 3}, id="three ahead"),
    pytest.param({"chunk": 3}, id="small steps"),
]  # fmt: skip


@pytest.mark.parametrize("sizes", CASES)
@pytest.mark.parametrize("qos", [QosClass.STANDARD, QosClass.BATCH])
def test_a_long_prompt_beside_a_flood_ends_within_its_bound(qos, sizes):
    engine, took, own = flooded(qos, 200, 8, seconds=bound(208), **sizes)
    assert [event.token >= 0 for event in own] == [True] * 8
    assert own[-1].finish_reason is FinishReason.LENGTH
    assert took <= bound(208)
    assert engine.statistics.preempted <= max_turns(208) + 60


@pytest.mark.parametrize("sizes", CASES[:4])
def test_a_long_answer_beside_a_flood_ends_within_its_bound(sizes):
    _, took, own = flooded(QosClass.BATCH, 20, 300, seconds=bound(320), **sizes)
    assert len(own) == 300
    assert took <= bound(320)


def test_with_a_quantum_of_nothing_it_starves(monkeypatch):
    """Negative control: 64 positions beyond those found in the cache, as if none had been lost."""
    monkeypatch.setattr(
        "reference.engine.slot_manager.end_of_quantum", lambda reached, begun, end: begun + QUANTUM
    )
    _, _, own = flooded(QosClass.BATCH, 200, 8, seconds=bound(208), prefix_cache=False)
    assert own == []


@pytest.mark.parametrize("begun", [0, 48, 1000, 100_000])
def test_a_turn_does_no_more_again_than_anew(begun):
    """Whatever of it is in the cache when it begins, and a known number of turns is enough."""
    end, reached, turns = 40_000, 0, 0
    while reached < end:
        first = min(begun, reached)
        to = end_of_quantum(reached, first, end)
        assert to > end or to - reached >= max(QUANTUM, reached - first)
        reached, turns = to, turns + 1
    assert turns <= max_turns(end) < 90


def test_a_gap_in_the_flood_does_not_begin_the_wait_anew():
    """A slot that is lost before anything was gained in it is no reason to wait anew."""
    engine, clock = engine_of(
        Tenant(1, "flood", qos=QosClass.INTERACTIVE), Tenant(2, "victim", qos=QosClass.BATCH),
        slots=1, prefix_cache=False,
    )  # fmt: skip
    engine.submit(Request(1, tuple(range(300)), 4, tenant=2, ignore_end=True))
    numbers = iter(range(1000, 9000))
    own: list[TokenEvent] = []
    current = 0

    def each(events: list[TokenEvent]) -> None:
        nonlocal current
        own.extend(event for event in events if event.request_id == 1)
        if any(event.finish_reason for event in events if event.request_id == current):
            current = 0
        if not current and engine.progress(1) > 16:
            # The next one comes as soon as the victim has read a little.
            current = next(numbers)
            prompt = (current % 1000, 5, 6)
            engine.submit(Request(current, prompt, 40, tenant=1, ignore_end=True))

    until(engine, clock, 200, each, lambda: ended(own))
    assert len(own) == 4


def test_what_a_protected_request_needs_is_not_taken_for_others_to_grow():
    """Pages run out while interactive requests grow: they wait, and it gets on."""
    _, took, own = flooded(QosClass.BATCH, 100, 100, seconds=bound(200), pages=14, slots=3)
    assert len(own) == 100
    assert took <= bound(200)
