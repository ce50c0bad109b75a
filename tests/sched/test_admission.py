"""Whose turn it is, whom it may displace, and how long anybody waits at most."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import RequestError
from contract.types import QosClass, Tenant
from reference.sched.admission import Running, Waiting, WaitQueue, victim
from reference.sched.tenants import Tenants
from tests.sched.manual_clock import ManualClock

AGING = 10.0
BIG = Tenant(0, "big", max_slots=100, max_kv_pages=1000, decode_tokens_per_s=1000)


def of_class(id: int, qos: QosClass, **fields: float) -> Tenant:
    return replace(BIG, id=id, name=f"tenant {id}", qos=qos, **fields)


def always(waiting: Waiting) -> bool:
    return True


@st.composite
def tenant_sets(draw: st.DrawFn) -> list[Tenant]:
    """One to six tenants of any class, weight and quota."""
    return [
        of_class(
            id,
            draw(st.sampled_from(QosClass)),
            weight=draw(st.sampled_from((0.5, 1.0, 1.0, 3.0))),
            max_slots=draw(st.integers(1, 5)),
            max_kv_pages=draw(st.integers(4, 40)),
        )
        for id in range(draw(st.integers(1, 6)))
    ]


def line_of(entry: Waiting) -> tuple[int, QosClass | None]:
    return entry.tenant, entry.qos


def candidates(tenants: Tenants, waiting: list[Waiting]) -> list[Waiting]:
    """The first of each tenant and class asked for, without those beyond a quota: the definition,
    over all that wait."""
    first: dict[tuple[int, QosClass | None], Waiting] = {}
    for entry in sorted(waiting, key=lambda entry: entry.order):
        first.setdefault(line_of(entry), entry)
    return [e for e in first.values() if tenants.within_quota(e.tenant, e.pages)]


@given(tenant_sets(), st.data())
def test_the_choice_is_the_definition(declared: list[Tenant], data: st.DataObject) -> None:
    """Against a plain search over everything that waits: class, lowest share, first come; among
    the aged, who waits longest without a slot, and nobody passes; no quota is exceeded."""
    clock = ManualClock()
    tenants = Tenants(declared, clock=clock)
    queue = WaitQueue(tenants, clock=clock, aging_seconds=AGING)
    waiting: list[Waiting] = []
    running: list[Waiting] = []
    began = {(tenant.id, qos): 0.0 for tenant in declared for qos in (None, *QosClass)}
    for order in range(data.draw(st.integers(1, 25), "requests")):
        clock.now += data.draw(st.sampled_from((0.0, 0.5, 6.0)), "pause")
        tenant = data.draw(st.sampled_from(declared), "tenant").id
        pages = data.draw(st.integers(1, 9), "pages")
        qos = data.draw(st.sampled_from((None, None, *QosClass)), "class")
        entry = Waiting(order, tenant, clock.now, pages, qos)
        if all(line_of(other) != line_of(entry) for other in waiting):
            began[line_of(entry)] = clock.now
        queue.push(entry)
        waiting.append(entry)
        if running and data.draw(st.booleans(), "ends"):
            gone = running.pop(data.draw(st.integers(0, len(running) - 1), "which"))
            tenants.occupy(gone.tenant, slots=-1, pages=-gone.pages, qos=gone.qos)
            if all(line_of(other) != line_of(gone) for other in running):
                began[line_of(gone)] = clock.now
        room = data.draw(st.integers(0, 10), "room")
        holders = {line_of(entry) for entry in running}
        able = candidates(tenants, waiting)
        aged = [
            entry
            for entry in able
            if line_of(entry) not in holders and clock.now - began[line_of(entry)] >= AGING
        ]
        expected: Waiting | None
        if aged:
            expected = min(aged, key=lambda e: (began[line_of(e)], e.order))
            expected = expected if expected.pages <= room else None
        else:
            expected = min(
                (entry for entry in able if entry.pages <= room),
                key=lambda e: (
                    max(tenants[e.tenant].qos.rank, e.qos.rank if e.qos else 0),
                    tenants.dominant_share(e.tenant),
                    e.order,
                ),
                default=None,
            )
        taken = queue.next(lambda e, room=room: e.pages <= room)  # type: ignore[misc]
        assert taken == expected
        if taken is not None:
            waiting.remove(taken)
            running.append(taken)
            tenants.occupy(taken.tenant, slots=1, pages=taken.pages, qos=taken.qos)
            usage = tenants.usage(taken.tenant)
            assert usage.slots <= tenants[taken.tenant].max_slots
            assert usage.pages <= tenants[taken.tenant].max_kv_pages or usage.slots == 1
        assert len(queue) == len(waiting)


def test_equal_shares_go_first_come_first_served() -> None:
    clock = ManualClock()
    tenants = Tenants([of_class(id, QosClass.STANDARD) for id in range(3)], clock=clock)
    queue = WaitQueue(tenants, clock=clock)
    for order, tenant in ((5, 2), (7, 0), (6, 1)):
        queue.push(Waiting(order, tenant, 0.0, 1))
    assert [queue.next(always).order for _ in range(3)] == [5, 6, 7]  # type: ignore[union-attr]


def test_a_tenants_lowered_requests_wait_behind_all_of_the_class_above_until_they_are_aged() -> (
    None
):
    """They hold up none of its other requests, and a stream of these does not starve them."""
    clock = ManualClock()
    tenants = Tenants(
        [of_class(0, QosClass.INTERACTIVE), of_class(1, QosClass.STANDARD)], clock=clock
    )
    queue = WaitQueue(tenants, clock=clock, aging_seconds=AGING)
    queue.push(Waiting(0, 0, 0.0, 1, QosClass.BATCH))
    queue.push(Waiting(1, 1, 0.0, 1, QosClass.INTERACTIVE))
    queue.push(Waiting(2, 0, 0.0, 1))
    assert queue.by_class() == dict.fromkeys(QosClass, 1)
    assert [queue.next(always).order for _ in range(2)] == [2, 1]  # type: ignore[union-attr]
    tenants.occupy(0, slots=1)
    clock.now = AGING
    queue.push(Waiting(3, 0, clock.now, 1))
    assert queue.aged(0, QosClass.BATCH)
    assert not queue.aged(0)
    assert [queue.next(always).order for _ in range(2)] == [0, 3]  # type: ignore[union-attr]


def small(waiting: Waiting) -> bool:
    return waiting.pages < 50


def test_what_has_no_room_lets_others_pass_until_it_is_aged() -> None:
    clock = ManualClock()
    classes = (QosClass.STANDARD, QosClass.BATCH)
    tenants = Tenants([of_class(id, qos) for id, qos in enumerate(classes)], clock=clock)
    queue = WaitQueue(tenants, clock=clock, aging_seconds=AGING)
    queue.push(Waiting(0, 0, 0.0, 50))
    for order in range(1, 4):
        queue.push(Waiting(order, 1, 0.0, 1))
    assert queue.next(small) == Waiting(1, 1, 0.0, 1)
    tenants.occupy(1, slots=1)
    clock.now = AGING
    assert queue.aged(0)
    assert not queue.aged(1)
    assert queue.next(small) is None
    assert queue.next(always) == Waiting(0, 0, 0.0, 50)
    assert queue.next(small) == Waiting(2, 1, 0.0, 1)


def test_who_holds_a_slot_does_not_age() -> None:
    """Else a tenant with long requests would take a slot more every ten seconds."""
    clock = ManualClock()
    tenants = Tenants([replace(BIG, id=id) for id in range(2)], clock=clock)
    queue = WaitQueue(tenants, clock=clock, aging_seconds=AGING)
    tenants.occupy(0, slots=1)
    queue.push(Waiting(0, 0, 0.0, 1))
    clock.now = 100.0
    queue.push(Waiting(1, 1, clock.now, 1))
    assert not queue.aged(0)
    tenants.occupy(0, slots=-1)
    clock.now += AGING - 1
    assert not queue.aged(0)
    clock.now += 1
    assert queue.aged(0)
    assert queue.aged(1)


def test_the_aged_beyond_their_own_quota_hold_up_nobody() -> None:
    clock = ManualClock()
    tenants = Tenants([replace(BIG, id=id, max_slots=1) for id in range(2)], clock=clock)
    tenants.occupy(0, slots=1)
    queue = WaitQueue(tenants, clock=clock, aging_seconds=AGING)
    queue.push(Waiting(0, 0, 0.0, 1))
    queue.push(Waiting(1, 1, 0.0, 1))
    clock.now = 2 * AGING
    assert queue.next(always) == Waiting(1, 1, 0.0, 1)
    assert queue.next(always) is None


def test_a_preempted_request_is_the_first_of_its_tenant_and_waits_anew() -> None:
    clock = ManualClock()
    tenants = Tenants([of_class(0, QosClass.INTERACTIVE), of_class(1, QosClass.BATCH)], clock=clock)
    queue = WaitQueue(tenants, clock=clock, aging_seconds=AGING)
    queue.push(Waiting(3, 1, 0.0, 1))
    clock.now = 100.0
    assert queue.next(always) == Waiting(3, 1, 0.0, 1)
    for order, tenant in ((8, 1), (9, 0), (3, 1)):
        queue.push(Waiting(order, tenant, clock.now, 1))
    assert not queue.aged(1)
    assert [queue.next(always).order for _ in range(3)] == [9, 3, 8]  # type: ignore[union-attr]


def test_room_may_be_made_while_choosing() -> None:
    """What is preempted for a candidate is pushed back at once, and comes after it."""
    clock = ManualClock()
    tenants = Tenants([of_class(0, QosClass.INTERACTIVE), of_class(1, QosClass.BATCH)], clock=clock)
    queue = WaitQueue(tenants, clock=clock, aging_seconds=AGING)
    tenants.occupy(1, slots=1)
    queue.push(Waiting(5, 0, 0.0, 1))
    queue.push(Waiting(6, 1, 0.0, 1))

    def make_room(waiting: Waiting) -> bool:
        tenants.occupy(1, slots=-1)
        queue.push(Waiting(2, 1, clock.now, 1))
        tenants.occupy(waiting.tenant, slots=1)
        return True

    assert queue.next(make_room) == Waiting(5, 0, 0.0, 1)
    assert len(queue) == 2
    assert [queue.next(always).order for _ in range(2)] == [2, 6]  # type: ignore[union-attr]


def test_a_request_can_be_removed_wherever_it_waits() -> None:
    clock = ManualClock()
    tenants = Tenants([BIG], clock=clock)
    queue = WaitQueue(tenants, clock=clock)
    for order in range(6):
        queue.push(Waiting(order, 0, 0.0, 1))
    for order in (0, 4, 4, 77):
        queue.remove(order)
    assert len(queue) == 4
    assert queue.by_class() == {QosClass.STANDARD: 4}
    assert [queue.next(always).order for _ in range(4)] == [1, 2, 3, 5]  # type: ignore[union-attr]
    assert queue.next(always) is None
    assert not queue.by_class()


def test_requests_given_up_leave_nothing_behind() -> None:
    """Behind a first request that never fits, others come and go: memory is that of those left."""
    clock = ManualClock()
    queue = WaitQueue(Tenants([BIG], clock=clock), clock=clock)
    queue.push(Waiting(0, 0, 0.0, 1))
    for order in range(1, 1000):
        queue.push(Waiting(order, 0, 0.0, 1))
        queue.remove(order)
        assert sum(len(line.orders) for line in queue._lines.values()) <= 3


def test_nobody_waits_for_an_unknown_tenant() -> None:
    clock = ManualClock()
    queue = WaitQueue(Tenants([BIG], clock=clock), clock=clock)
    with pytest.raises(RequestError, match="tenant: 9 is not known"):
        queue.push(Waiting(0, 9, 0.0, 1))
    assert len(queue) == 0


def test_who_is_sent_away_is_told_how_fast_the_queue_moves() -> None:
    clock = ManualClock(1000.0)
    queue = WaitQueue(Tenants([BIG], clock=clock), clock=clock)
    assert queue.retry_after() == 1.0
    for order in range(200):
        queue.push(Waiting(order, 0, clock.now, 1))
        queue.next(always)
        clock.now += 4.0
    assert queue.retry_after() == 4.0
    clock.now += 64 * 6.0
    assert queue.retry_after() == 10.0


class Looked:
    """Counts the requests that a choice asks room for."""

    def __init__(self) -> None:
        self.orders: list[int] = []

    def __call__(self, waiting: Waiting) -> bool:
        self.orders.append(waiting.order)
        return False


@pytest.mark.parametrize("requests", [10, 1000])
def test_a_choice_looks_at_one_request_of_each_tenant(requests: int) -> None:
    clock = ManualClock()
    tenants = Tenants([replace(BIG, id=id) for id in range(4)], clock=clock)
    queue = WaitQueue(tenants, clock=clock)
    for order in range(requests):
        queue.push(Waiting(order, order % 4, 0.0, 1))
    looked = Looked()
    assert queue.next(looked) is None
    assert looked.orders == [0, 1, 2, 3]


HOLD = 3.0
"""Seconds a request runs in the simulation below, and thus the longest until room appears."""


def waits(
    slots: int, declared: list[Tenant], arrivals: Iterator[tuple[int, int]], aging: float
) -> tuple[dict[int, list[float]], WaitQueue]:
    """Simulate admission in steps of 0.25 s: one request each of ``arrivals`` (step, tenant) waits
    for one of ``slots``, and nobody is preempted.

    Returns how long each tenant waited without a slot before each admission, and the queue as it
    is left.
    """
    clock = ManualClock()
    tenants = Tenants(declared, clock=clock)
    queue = WaitQueue(tenants, clock=clock, aging_seconds=aging)
    ends: list[tuple[float, int]] = []
    held = {tenant.id: 0.0 for tenant in declared}
    waited: dict[int, list[float]] = {tenant.id: [] for tenant in declared}
    for order, (step, tenant) in enumerate(arrivals):
        while clock.now < step * 0.25:
            clock.now += 0.25
            for end, holder in [entry for entry in ends if entry[0] <= clock.now]:
                ends.remove((end, holder))
                tenants.occupy(holder, slots=-1)
                held[holder] = end
            while len(ends) < slots and (taken := queue.next(always)) is not None:
                ends.append((clock.now + HOLD, taken.tenant))
                tenants.occupy(taken.tenant, slots=1)
                waited[taken.tenant].append(clock.now - max(taken.since, held[taken.tenant]))
        queue.push(Waiting(order, tenant, clock.now, 1))
    return waited, queue


def crowd(tenants: int) -> Iterator[tuple[int, int]]:
    """Arrivals: tenants 1 and up have one request a step for ever; after 10 s tenant 0 has four."""
    for step in range(1, 1000):
        for tenant in range(1, tenants):
            yield step, tenant
        if step == 40:
            yield from [(step, 0)] * 4


def crowded(tenants: int) -> list[Tenant]:
    """A batch tenant, 0, among interactive ones whose share is always lower."""
    return [of_class(0, QosClass.BATCH)] + [
        of_class(id, QosClass.INTERACTIVE, weight=50.0) for id in range(1, tenants)
    ]


@pytest.mark.parametrize("tenants", [2, 3, 6])
@pytest.mark.parametrize("slots", [1, 4])
def test_the_starvation_bound_is_met(tenants: int, slots: int) -> None:
    """A stream of interactive requests that alone would fill every slot for ever: the batch tenant
    is never without a slot for more than ``aging + T * R`` seconds."""
    waited, _ = waits(slots, crowded(tenants), crowd(tenants), AGING)
    assert len(waited[0]) == 4
    assert max(waited[0]) <= AGING + tenants * HOLD
    # Reached because of aging, not because there was room.
    assert min(waited[0]) >= AGING


def test_without_aging_the_bound_is_missed() -> None:
    """Negative control: the same crowd for 240 s, nobody ever aged, and batch work starves."""
    waited, queue = waits(1, crowded(3), crowd(3), math.inf)
    assert waited[0] == []
    assert queue.by_class()[QosClass.BATCH] == 4


class Mix(NamedTuple):
    """A random load: requests a second of each tenant, and how long they run at most."""

    declared: list[Tenant]
    slots: int
    arrivals: float
    hold: float
    seed: int


MIXES = st.builds(
    Mix,
    st.lists(st.sampled_from(QosClass), min_size=1, max_size=5).map(
        lambda classes: [of_class(id, qos) for id, qos in enumerate(classes)]
    ),
    st.integers(1, 4),
    st.sampled_from((0.1, 0.5, 2.0)),
    st.sampled_from((1.0, 4.0, 30.0)),
    st.integers(0, 1000),
)


def longest_without_slot(mix: Mix, aging: float, room: int = 20, step: float = 0.5) -> float:
    """The longest any tenant had requests waiting and no slot, in 120 s of a random load where
    requests take up to ``room`` of as many pages and run for up to ``mix.hold`` seconds."""
    clock, random_ = ManualClock(), random.Random(mix.seed)
    tenants = Tenants(mix.declared, clock=clock)
    queue = WaitQueue(tenants, clock=clock, aging_seconds=aging)
    running: list[tuple[float, Waiting]] = []
    began: dict[int, float] = {}
    waiting: Counter[int] = Counter()
    order, longest = 0, 0.0

    def fits(waiting: Waiting) -> bool:
        held = sum(entry.pages for _, entry in running)
        return len(running) < mix.slots and held + waiting.pages <= room

    for _ in range(round(120 / step)):
        clock.now += step
        for end, entry in [item for item in running if item[0] <= clock.now]:
            running.remove((end, entry))
            tenants.occupy(entry.tenant, slots=-1, pages=-entry.pages)
        for tenant in mix.declared:
            if random_.random() < mix.arrivals * step:
                queue.push(Waiting(order, tenant.id, clock.now, random_.randint(1, room)))
                waiting[tenant.id] += 1
                order += 1
        while (taken := queue.next(fits)) is not None:
            tenants.occupy(taken.tenant, slots=1, pages=taken.pages)
            waiting[taken.tenant] -= 1
            seconds = step * random_.randint(1, round(mix.hold / step))
            running.append((clock.now + seconds, taken))
        for tenant in mix.declared:
            holds = any(entry.tenant == tenant.id for _, entry in running)
            if holds or not waiting[tenant.id]:
                began[tenant.id] = clock.now
            longest = max(longest, clock.now - began.setdefault(tenant.id, clock.now))
    return longest


@given(MIXES)
def test_the_starvation_bound_is_met_by_any_load(mix: Mix) -> None:
    """Whatever arrives, of whatever class and size: ``aging + T * R``, where R is the longest that
    a request runs."""
    bound = AGING + len(mix.declared) * mix.hold
    assert longest_without_slot(mix, AGING) <= bound


def test_a_load_that_needs_aging_misses_the_bound_without() -> None:
    """Negative control of the simulation above."""
    classes = (QosClass.INTERACTIVE, QosClass.INTERACTIVE, QosClass.BATCH)
    declared = [of_class(id, qos) for id, qos in enumerate(classes)]
    mix = Mix(declared, slots=1, arrivals=2.0, hold=1.0, seed=0)
    assert longest_without_slot(mix, AGING) <= AGING + 3
    assert longest_without_slot(mix, math.inf) > 100


@st.composite
def populations(draw: st.DrawFn) -> tuple[Tenants, list[Running]]:
    """Tenants that use what their running requests hold."""
    declared = draw(tenant_sets())
    tenants = Tenants(declared, clock=ManualClock())
    running = []
    for slot in range(draw(st.integers(0, 10))):
        tenant = draw(st.sampled_from(declared))
        entry = Running(
            order=draw(st.integers(0, 1000).filter(lambda o: all(o != r.order for r in running))),
            tenant=tenant.id,
            qos=tenant.qos.lowered_to(draw(st.sampled_from((None, *QosClass)))),
            slot=slot,
            pages=draw(st.integers(0, 9)),
            protected=draw(st.booleans()),
        )
        tenants.occupy(entry.tenant, slots=1, pages=entry.pages)
        running.append(entry)
    return tenants, running


@given(populations(), st.data())
def test_a_claimant_displaces_only_what_is_below_it(
    population: tuple[Tenants, list[Running]], data: st.DataObject
) -> None:
    """Never an interactive request, one of its own class or above, or a protected one; of the
    rest the lowest class, the highest share, the youngest."""
    tenants, running = population
    claimant = data.draw(st.sampled_from(list(tenants)), "claimant")
    below = [
        entry for entry in running if entry.qos.rank > claimant.qos.rank and not entry.protected
    ]
    chosen = victim(running, tenants, claimant.qos)
    if chosen is None:
        assert not below
        return
    assert chosen in below
    assert chosen.qos is not QosClass.INTERACTIVE
    ranks = [entry.qos.rank for entry in below]
    assert chosen.qos.rank == max(ranks)
    lowest = [e for e, rank in zip(below, ranks, strict=True) if rank == max(ranks)]
    share = tenants.dominant_share(chosen.tenant)
    assert share == max(tenants.dominant_share(entry.tenant) for entry in lowest)
    assert all(
        entry.order <= chosen.order
        for entry in lowest
        if tenants.dominant_share(entry.tenant) == share
    )


@given(populations())
def test_memory_can_always_be_had(population: tuple[Tenants, list[Running]]) -> None:
    """Without a claimant somebody is chosen while anything runs, of the lowest class: a protected
    request only when all of the class are."""
    tenants, running = population
    chosen = victim(running, tenants, None)
    if not running:
        assert chosen is None
        return
    assert chosen is not None
    lowest = max(entry.qos.rank for entry in running)
    of_it = [entry for entry in running if entry.qos.rank == lowest]
    assert chosen in ([entry for entry in of_it if not entry.protected] or of_it)


def test_preemption_ends() -> None:
    """Taking victims one after the other, the whole order: batch, standard, then interactive, the
    protected after the others of their class."""
    classes = (QosClass.INTERACTIVE, QosClass.STANDARD, QosClass.BATCH)
    tenants = Tenants([of_class(id, qos) for id, qos in enumerate(classes)], clock=ManualClock())
    running = [
        Running(order, order % 3, classes[order % 3], order, 1, order < 3) for order in range(9)
    ]
    for entry in running:
        tenants.occupy(entry.tenant, slots=1, pages=entry.pages)
    taken = []
    while (chosen := victim(running, tenants, None)) is not None:
        running.remove(chosen)
        tenants.occupy(chosen.tenant, slots=-1, pages=-chosen.pages)
        taken.append(chosen.order)
    assert taken == [8, 5, 2, 7, 4, 1, 6, 3, 0]
