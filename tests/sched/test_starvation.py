"""How long anybody waits at most, whatever else arrives."""

import math
import random
from collections import Counter
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from contract.types import QosClass, Tenant
from reference.sched.tenants import Tenants
from reference.sched.wait_queue import WaitingRequest, WaitQueue
from tests.sched.manual_clock import ManualClock
from tests.sched.tenant_sets import AGING, of_class


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
def test_the_starvation_bound_is_met_by_any_load(mix):
    """Whatever arrives, of whatever class and size: ``aging + T * R``, where R is the longest that
    a request runs."""
    bound = AGING + len(mix.declared) * mix.hold
    assert longest_without_slot(mix, AGING) <= bound


def test_a_load_that_needs_aging_misses_the_bound_without():
    """Negative control of the simulation above."""
    classes = (QosClass.INTERACTIVE, QosClass.INTERACTIVE, QosClass.BATCH)
    declared = [of_class(id, qos) for id, qos in enumerate(classes)]
    mix = Mix(declared, slots=1, arrivals=2.0, hold=1.0, seed=0)
    assert longest_without_slot(mix, AGING) <= AGING + 3
    assert longest_without_slot(mix, math.inf) > 100
