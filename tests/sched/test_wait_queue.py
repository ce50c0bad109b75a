"""Whose turn it is."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import RequestError
from contract.types import QosClass, Tenant
from reference.sched.tenants import Tenants
from reference.sched.wait_queue import WaitingRequest, WaitQueue
from tests.sched.manual_clock import ManualClock
from tests.sched.tenant_sets import AGING, BIG, always, of_class, tenant_sets


def line_of(entry: WaitingRequest) -> tuple[int, QosClass | None]:
    return entry.tenant, entry.qos


class Began:
    """When each tenant, and each line of it, last had a slot or began to wait: the definition."""

    def __init__(self) -> None:
        self._waiting: dict[object, float] = {}
        self._served: dict[object, float] = {}

    @staticmethod
    def keys(entry: WaitingRequest) -> tuple[object, object]:
        """The tenant, and what of it asks for one class."""
        return entry.tenant, line_of(entry)

    def waits(self, entry: WaitingRequest, waiting: list[WaitingRequest], now: float) -> None:
        for key in self.keys(entry):
            if not any(key in self.keys(other) for other in waiting):
                self._waiting[key] = now

    def leaves(self, entry: WaitingRequest, now: float) -> None:
        self._served.update(dict.fromkeys(self.keys(entry), now))

    def aged_since(self, key: object, running: list[WaitingRequest], now: float) -> float | None:
        if any(key in self.keys(other) for other in running):
            return None
        since = max(self._waiting[key], self._served.get(key, 0.0))
        return since if now - since >= AGING else None


def candidates(tenants: Tenants, waiting: list[WaitingRequest]) -> list[WaitingRequest]:
    """The first of each tenant and class asked for, without those beyond a quota: the definition,
    over all that wait."""
    first: dict[tuple[int, QosClass | None], WaitingRequest] = {}
    for entry in sorted(waiting, key=lambda entry: entry.order):
        first.setdefault(line_of(entry), entry)
    return [e for e in first.values() if tenants.within_quota(e.tenant, e.pages)]


def expected_choice(
    tenants: Tenants, waiting: list[WaitingRequest], running: list[WaitingRequest], began: Began,
    now: float, room: int,
) -> WaitingRequest | None:  # fmt: skip
    """A plain search over everything that waits."""
    able = candidates(tenants, waiting)
    since = {line_of(entry): began.aged_since(line_of(entry), running, now) for entry in able}

    def rank(entry: WaitingRequest) -> int:
        own = tenants[entry.tenant].qos
        return (own if since[line_of(entry)] is not None else own.lowered_to(entry.qos)).rank

    def within_tenant(entry: WaitingRequest) -> tuple[float, int, int]:
        aged = since[line_of(entry)]
        return math.inf if aged is None else aged, rank(entry), entry.order

    aged = {e.tenant: began.aged_since(e.tenant, running, now) for e in able}
    waited = [(begun, tenant) for tenant, begun in aged.items() if begun is not None]
    firsts = [
        (begun, min((e for e in able if e.tenant == tenant), key=within_tenant))
        for begun, tenant in waited
    ]
    if firsts:
        _, first = min(firsts, key=lambda each: (each[0], each[1].order))
        return first if first.pages <= room else None

    def turn(entry: WaitingRequest) -> tuple[float, ...]:
        alike = [e.order for e in able if e.tenant == entry.tenant and rank(e) == rank(entry)]
        share = tenants.dominant_share(entry.tenant)
        return rank(entry), share, min(alike), *within_tenant(entry)

    return min((entry for entry in able if entry.pages <= room), key=turn, default=None)


@given(tenant_sets(), st.data())
def test_the_choice_is_the_definition(declared, data):
    """Against a plain search over everything that waits: class, lowest share, first come; among
    the aged tenants, who waits longest without a slot, and nobody passes; within a tenant the lines
    that waited too long first; no quota is exceeded."""
    clock = ManualClock()
    tenants = Tenants(declared, clock=clock)
    queue = WaitQueue(tenants, clock=clock, aging_seconds=AGING)
    waiting: list[WaitingRequest] = []
    running: list[WaitingRequest] = []
    began = Began()
    for order in range(data.draw(st.integers(1, 25), "requests")):
        clock.now += data.draw(st.sampled_from((0.0, 0.5, 6.0)), "pause")
        tenant = data.draw(st.sampled_from(declared), "tenant").id
        pages = data.draw(st.integers(1, 9), "pages")
        qos = data.draw(st.sampled_from((None, None, *QosClass)), "class")
        entry = WaitingRequest(order, tenant, clock.now, pages, qos)
        began.waits(entry, waiting, clock.now)
        queue.push(entry)
        waiting.append(entry)
        if running and data.draw(st.booleans(), "ends"):
            gone = running.pop(data.draw(st.integers(0, len(running) - 1), "which"))
            tenants.occupy(gone.tenant, slots=-1, pages=-gone.pages, qos=gone.qos)
            began.leaves(gone, clock.now)
        room = data.draw(st.integers(0, 10), "room")
        expected = expected_choice(tenants, waiting, running, began, clock.now, room)
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
        for line in map(line_of, waiting):
            aged = began.aged_since(line, running, clock.now) is not None
            assert (queue.line_aged_since(*line) is not None) == aged


def queue_of(*declared: Tenant, now: float = 0.0) -> tuple[ManualClock, Tenants, WaitQueue]:
    clock = ManualClock(now)
    tenants = Tenants(declared, clock=clock)
    return clock, tenants, WaitQueue(tenants, clock=clock, aging_seconds=AGING)


def orders(queue: WaitQueue, count: int) -> list[int]:
    """The next ones."""
    return [queue.next(always).order for _ in range(count)]  # type: ignore[union-attr]


def small(waiting: WaitingRequest) -> bool:
    return waiting.pages < 50


def test_what_has_no_room_lets_others_pass_until_it_is_aged():
    clock, tenants, queue = queue_of(of_class(0, QosClass.STANDARD), of_class(1, QosClass.BATCH))
    queue.push(WaitingRequest(0, 0, 0.0, 50))
    for order in range(1, 4):
        queue.push(WaitingRequest(order, 1, 0.0, 1))
    assert queue.next(small) == WaitingRequest(1, 1, 0.0, 1)
    tenants.occupy(1, slots=1)
    clock.now = AGING
    assert queue.aged(0)
    assert not queue.aged(1)
    assert queue.next(small) is None
    assert queue.next(always) == WaitingRequest(0, 0, 0.0, 50)
    assert queue.next(small) == WaitingRequest(2, 1, 0.0, 1)


def test_an_aged_request_that_cannot_begin_yet_lets_others_pass():
    """First those of its own tenant, of whatever class, then those of others: while its pages are
    read from disk no slot is free for nothing."""
    *_, queue = queue_of(BIG, replace(BIG, id=1), now=AGING)
    queue.push(WaitingRequest(0, 0, 0.0, 1))
    queue.push(WaitingRequest(1, 1, AGING, 1))
    queue.push(WaitingRequest(2, 0, AGING, 1, QosClass.BATCH))
    queue.push(WaitingRequest(3, 0, AGING, 1))

    def begins(waiting: WaitingRequest) -> bool | None:
        return True if waiting.order else None

    assert queue.tenant_aged(0)
    assert [queue.next(begins) for _ in range(4)] == [
        WaitingRequest(3, 0, AGING, 1), WaitingRequest(2, 0, AGING, 1, QosClass.BATCH),
        WaitingRequest(1, 1, AGING, 1), None,
    ]  # fmt: skip


def test_a_preempted_request_is_the_first_of_its_tenant_and_waits_anew():
    clock, _, queue = queue_of(of_class(0, QosClass.INTERACTIVE), of_class(1, QosClass.BATCH))
    queue.push(WaitingRequest(3, 1, 0.0, 1))
    clock.now = 100.0
    assert queue.next(always) == WaitingRequest(3, 1, 0.0, 1)
    for order, tenant in ((8, 1), (9, 0), (3, 1)):
        queue.push(WaitingRequest(order, tenant, clock.now, 1))
    assert not queue.aged(1)
    assert orders(queue, 3) == [9, 3, 8]


def test_room_may_be_made_while_choosing():
    """What is preempted for a candidate is pushed back at once, and comes after it."""
    clock, tenants, queue = queue_of(of_class(0, QosClass.INTERACTIVE), of_class(1, QosClass.BATCH))
    tenants.occupy(1, slots=1)
    queue.push(WaitingRequest(5, 0, 0.0, 1))
    queue.push(WaitingRequest(6, 1, 0.0, 1))

    def make_room(waiting: WaitingRequest) -> bool:
        tenants.occupy(1, slots=-1)
        queue.push(WaitingRequest(2, 1, clock.now, 1))
        tenants.occupy(waiting.tenant, slots=1)
        return True

    assert queue.next(make_room) == WaitingRequest(5, 0, 0.0, 1)
    assert len(queue) == 2
    assert orders(queue, 2) == [2, 6]


def test_a_request_can_be_removed_wherever_it_waits():
    *_, queue = queue_of(BIG)
    for order in range(6):
        queue.push(WaitingRequest(order, 0, 0.0, 1))
    for order in (0, 4, 4, 77):
        queue.remove(order)
    assert len(queue) == 4
    assert orders(queue, 4) == [1, 2, 3, 5]
    assert queue.next(always) is None
    assert len(queue) == 0


def test_requests_given_up_leave_nothing_behind():
    """Behind a first request that never fits, others come and go: memory is that of those left."""
    *_, queue = queue_of(BIG)
    queue.push(WaitingRequest(0, 0, 0.0, 1))
    for order in range(1, 1000):
        queue.push(WaitingRequest(order, 0, 0.0, 1))
        queue.remove(order)
        (group,) = queue._groups.values()
        assert sum(len(line.orders) for line in group.lines.values()) <= 3


def test_nobody_waits_for_an_unknown_tenant():
    *_, queue = queue_of(BIG)
    with pytest.raises(RequestError, match="tenant: 9 is not known"):
        queue.push(WaitingRequest(0, 9, 0.0, 1))
    assert len(queue) == 0


def test_who_is_sent_away_is_told_how_fast_the_queue_moves():
    clock, _, queue = queue_of(BIG, now=1000.0)
    assert queue.retry_after() == 1.0
    for order in range(200):
        queue.push(WaitingRequest(order, 0, clock.now, 1))
        queue.next(always)
        clock.now += 4.0
        queue.ended(order)
    assert queue.retry_after() == 4.0
    clock.now += 64 * 6.0
    assert queue.retry_after() == 4.0
    for order in (200, 201):
        queue.push(WaitingRequest(order, 0, clock.now, 1))
        queue.next(always)
    assert queue.retry_after() == 2.0


def test_before_the_first_end_what_runs_says_how_long_runs_take():
    clock, _, queue = queue_of(BIG, now=1000.0)
    queue.push(WaitingRequest(0, 0, clock.now, 1))
    queue.next(always)
    clock.now += 9.0
    assert queue.retry_after() == 9.0
    queue.push(WaitingRequest(1, 0, clock.now, 1))
    queue.next(always)
    assert queue.retry_after() == 4.5


def test_a_preempted_request_counts_with_all_its_time_in_slots():
    """Not with that between them, and one that never had a slot not at all."""
    clock, _, queue = queue_of(BIG, now=1000.0)
    for _ in range(2):
        queue.push(WaitingRequest(0, 0, clock.now, 1))
        clock.now += 50.0
        queue.next(always)
        clock.now += 3.0
    queue.ended(0)
    queue.push(WaitingRequest(1, 0, clock.now, 1))
    clock.now += 50.0
    queue.remove(1)
    queue.ended(1)
    assert queue.retry_after() == 6.0
