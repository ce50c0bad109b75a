"""How long anybody waits at most, whatever else arrives."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.types import QosClass, Tenant
from reference.sched.tenants import Tenants
from reference.sched.wait_queue import WaitingRequest, WaitQueue
from tests.sched.manual_clock import ManualClock
from tests.sched.tenant_sets import AGING, always, of_class

HOLD = 3.0
"""Seconds a request runs in the simulation below, and thus the longest until room appears."""


def waits(
    slots: int, declared: list[Tenant], arrivals: Iterator[tuple[int, int]], aging: float
) -> tuple[dict[int, list[float]], WaitQueue]:
    """Simulate admission in steps of 0.25 s: one request each of ``arrivals`` (step, tenant) waits
    for one of ``slots``, and nobody is preempted.

    Returns how long each tenant waited without a slot before each admission, and the queue as it
    is left."""
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
        queue.push(WaitingRequest(order, tenant, clock.now, 1))
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
    waited, _ = waits(1, crowded(3), crowd(3), math.inf)
    assert waited[0] == []


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
    running: list[tuple[float, WaitingRequest]] = []
    began: dict[int, float] = {}
    waiting: Counter[int] = Counter()
    order, longest = 0, 0.0

    def fits(waiting: WaitingRequest) -> bool:
        held = sum(entry.pages for _, entry in running)
        return len(running) < mix.slots and held + waiting.pages <= room

    for _ in range(round(120 / step)):
        clock.now += step
        for end, entry in [item for item in running if item[0] <= clock.now]:
            running.remove((end, entry))
            tenants.occupy(entry.tenant, slots=-1, pages=-entry.pages)
        for tenant in mix.declared:
            if random_.random() < mix.arrivals * step:
                queue.push(WaitingRequest(order, tenant.id, clock.now, random_.randint(1, room)))
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
