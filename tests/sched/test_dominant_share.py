"""The theorems of dominant resource fairness, on the real queue, filling an engine of many slots.

Every request holds one slot and some pages for ever, nobody runs out of requests, and requests are
small beside the engine (at most 1 % of it), so that the filling is nearly fluid. What the theorems
say of a fluid holds here up to the size of one request; where a tolerance is derived, it is said
how. Ghodsi et al., "Dominant Resource Fairness", NSDI 2011, sections 3 and 4."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from contract.types import Tenant
from reference.sched.tenants import Tenants
from reference.sched.wait_queue import WaitingRequest, WaitQueue
from tests.sched.manual_clock import ManualClock

SLOTS = 300
PAGES = 1500
PAGES_MOST = 15
"""Most pages of a request: 1 % of PAGES."""


@dataclass(frozen=True)
class User:
    """A tenant whose requests need ``pages`` each; it never has more than ``max_requests``."""

    pages: int
    weight: float = 1.0
    max_requests: int = SLOTS

    @property
    def part(self) -> float:
        """What one request takes of the engine, in its dominant resource."""
        return max(1 / SLOTS, self.pages / PAGES)


Rule = type[Tenants]


def fill(
    users: list[User], rule: Rule = Tenants, queue_type: type[WaitQueue] = WaitQueue
) -> list[int]:
    """Admit until nobody is admitted any more; how many requests each user got."""
    clock = ManualClock()
    whole = Tenant(0, "user", max_slots=SLOTS, max_kv_pages=PAGES)
    tenants = rule(
        [replace(whole, id=id, weight=user.weight) for id, user in enumerate(users)], clock=clock
    )
    queue = queue_type(tenants, clock=clock)
    got = [0] * len(users)
    order = 0

    def push(id: int) -> None:
        nonlocal order
        if got[id] < users[id].max_requests:
            queue.push(WaitingRequest(order, id, clock.now, users[id].pages))
        order += 1

    def fits(waiting: WaitingRequest) -> bool:
        used = sum(user.pages * count for user, count in zip(users, got, strict=True))
        return waiting.pages <= PAGES - used

    for id in range(len(users)):
        push(id)
    while sum(got) < SLOTS and (taken := queue.next(fits)) is not None:
        tenants.occupy(taken.tenant, slots=1, pages=taken.pages)
        got[taken.tenant] += 1
        push(taken.tenant)
    return got


USERS = st.lists(
    st.builds(
        User,
        st.integers(1, PAGES_MOST),
        st.sampled_from((0.5, 1.0, 1.0, 2.0)),
        st.sampled_from((SLOTS, SLOTS, SLOTS, 20)),
    ),
    min_size=2,
    max_size=6,
)


def shortfall(users: list[User], got: list[int]) -> float:
    """How much less the worst-off user got than in an engine of its own: its weight's part of the
    slots and pages. In requests; above 0 means that sharing does not pay for that user.

    A user stops when a resource is used up but for less than its request. Until then nobody had a
    dominant share above its own by more than one request, so that all shares together with one
    request of each fill the engine: it has at least its part of 1 - (the sum of one request each).
    """
    total = sum(user.weight for user in users)
    granularity = sum(user.part for user in users)
    return max(
        min(user.max_requests, (1 - granularity) * user.weight / total / user.part) - count
        for user, count in zip(users, got, strict=True)
    )


def envy(users: list[User], got: list[int]) -> float:
    """How many more requests some user could run with another's slots and pages, scaled by weight,
    beyond what one request more or less explains.

    The other's dominant share was at most one of its requests above the user's when the user was
    stopped; after that it can still have got what was too little for a request of the user."""
    worst = 0.0
    for user, count in zip(users, got, strict=True):
        for other, has in zip(users, got, strict=True):
            if count == user.max_requests:
                continue
            scale = user.weight / other.weight
            possible = scale * min(has, has * other.pages / user.pages)
            leftover = scale * max(1.0, user.pages / other.pages)
            worst = max(worst, possible - count - scale * other.part / user.part - leftover)
    return worst


def wasted(users: list[User], got: list[int]) -> bool:
    """Whether a user could have one more request without taking anything from anybody."""
    slots = SLOTS - sum(got)
    pages = PAGES - sum(user.pages * count for user, count in zip(users, got, strict=True))
    return any(
        count < user.max_requests and slots >= 1 and pages >= user.pages
        for user, count in zip(users, got, strict=True)
    )


@given(USERS)
def test_sharing_incentive(users):
    """Nobody would be better off with an engine of its own."""
    assert shortfall(users, fill(users)) <= 0


@given(USERS)
def test_envy_freeness(users):
    """Nobody would rather have what another has."""
    assert envy(users, fill(users)) <= 0


@given(USERS)
def test_pareto_efficiency(users):
    """Nobody can be given more without taking from another."""
    assert not wasted(users, fill(users))


def gain_of_lie(users: list[User], claimed: User, rule: Rule = Tenants) -> int:
    """Requests that the first user can run more by claiming to need what ``claimed`` says, than
    by telling the truth. With fewer pages than a request needs, several are put together."""
    honest = users[0]
    truth = fill([replace(honest, max_requests=SLOTS), *users[1:]], rule)[0]
    lie = fill([claimed, *users[1:]], rule)[0]
    useful = min(lie, lie * claimed.pages // honest.pages)
    return min(useful, honest.max_requests) - min(truth, honest.max_requests)


def explained(users: list[User]) -> int:
    """What a lie may gain where requests are not a fluid: one request, and those that fit into what
    is left when the largest request fits no more."""
    return 1 + (PAGES_MOST - 1) // users[0].pages


@given(USERS, st.integers(1, PAGES_MOST), st.sampled_from((SLOTS, 5, 40)))
def test_strategy_proofness(users, pages, most):
    """Claiming other needs than one has gains nothing."""
    claimed = replace(users[0], pages=pages, max_requests=most)
    assert gain_of_lie(users, claimed) <= explained(users)


class SlotsAlone(Tenants):
    """Fair in slots, blind to pages."""

    def dominant_share(self, id: int) -> float:
        return self.usage(id).slots / self[id].weight


class WeightsIgnored(Tenants):
    """Fair among equals only."""

    def dominant_share(self, id: int) -> float:
        return super().dominant_share(id) * self[id].weight


class LargestFirst(Tenants):
    """Favours who holds the most pages for each slot."""

    def dominant_share(self, id: int) -> float:
        usage = self.usage(id)
        return -usage.pages / usage.slots if usage.slots else -math.inf


class NobodyPasses(WaitQueue):
    """What has no room holds up everybody."""

    def next(self, fits: Callable[[WaitingRequest], bool]) -> WaitingRequest | None:
        refused: list[WaitingRequest] = []

        def fits_first(waiting: WaitingRequest) -> bool:
            if refused or not fits(waiting):
                refused.append(waiting)
            return not refused

        return super().next(fits_first)


def test_rules_that_are_not_dominant_resource_fairness_fail():
    """Negative controls: for each theorem a rule, or a way of passing, that breaks it."""
    unlike = [User(PAGES_MOST), User(1)]
    assert shortfall(unlike, fill(unlike, SlotsAlone)) > 10
    assert shortfall(unlike, fill(unlike)) <= 0

    weighted = [User(5, 2.0), User(5, 0.5)]
    assert envy(weighted, fill(weighted, WeightsIgnored)) > 10
    assert envy(weighted, fill(weighted)) <= 0

    uneven = [User(11), User(4), User(4)]
    assert wasted(uneven, fill(uneven, queue_type=NobodyPasses))
    assert not wasted(uneven, fill(uneven))

    users = [User(5), User(10), User(10)]
    lie = replace(users[0], pages=PAGES_MOST)
    assert gain_of_lie(users, lie, LargestFirst) > 5 * explained(users)
    assert gain_of_lie(users, lie) <= explained(users)
