"""Quotas and usage: never exceeded at an admission, whatever was counted before."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import ConfigError, RequestError
from contract.types import LOCAL_TENANT, QosClass, Request, Tenant
from reference.sched.rates import BUCKETS_PER_SECOND, WINDOW_SECONDS, RateWindow
from reference.sched.tenants import Tenants, Usage
from tests.sched.manual_clock import ManualClock

TEAM = Tenant(1, "team", max_slots=3, max_kv_pages=20, decode_tokens_per_s=10)


class Counted(NamedTuple):
    """So many tokens counted ``wait`` seconds after the ones before."""

    wait: float
    tokens: int


HISTORIES = st.lists(
    st.builds(Counted, st.floats(0, 7) | st.sampled_from((0.0, 1 / 16, 5.0)), st.integers(0, 90)),
    max_size=40,
)


@given(HISTORIES)
def test_a_window_never_reports_less_than_it_holds(history):
    """At least what was counted in the last 5 s, at most that of one bucket more."""
    window, now, counted = RateWindow(), 0.0, []
    for wait, tokens in history:
        now += wait
        window.add(now, tokens)
        counted.append((now, tokens))
        exact = sum(tokens for at, tokens in counted if at > now - WINDOW_SECONDS)
        longer = WINDOW_SECONDS + 1 / BUCKETS_PER_SECOND
        assert exact <= window.total(now) <= sum(n for at, n in counted if at >= now - longer)
    assert window.total(now + WINDOW_SECONDS + 1 / BUCKETS_PER_SECOND) == 0


@given(HISTORIES, st.integers(1, 40))
def test_when_a_rate_is_below_a_bound_is_known(history, rate):
    """From then on, and not a bucket before."""
    window, now = RateWindow(), 0.0
    for wait, tokens in history:
        now += wait
        window.add(now, tokens)
    seconds = window.below_in(now, rate)
    assert (seconds == 0) == (window.per_second(now) < rate)
    if seconds:
        assert window.per_second(now + seconds - 1e-6) >= rate
        assert window.per_second(now + seconds + 1e-6) < rate


def test_a_clock_that_goes_back_stands_still():
    window = RateWindow()
    window.add(10.0, 5)
    window.add(3.0, 2)
    assert window.total(2.0) == window.total(14.9) == 7
    assert window.total(15.1) == 0


@given(HISTORIES, st.lists(st.integers(1, 12), max_size=12), st.data())
def test_no_admission_exceeds_a_quota(history, requests, data):
    """Right after an admission every hard cap holds, and right before it the rate was below its
    cap, counted here from the events themselves."""
    clock = ManualClock()
    tenants = Tenants([TEAM], clock=clock)
    counted, held = [], []
    for wait, tokens in history:
        clock.now += wait
        tenants.count(1, prefilled=0, decoded=tokens)
        counted.append((clock.now, tokens))
        if held and data.draw(st.booleans(), "ends"):
            tenants.occupy(1, slots=-1, pages=-held.pop(0))
        if requests and tenants.within_quota(1, requests[0]):
            held.append(requests.pop(0))
            tenants.occupy(1, slots=1, pages=held[-1])
            assert len(held) <= TEAM.max_slots
            assert sum(held) <= TEAM.max_kv_pages or len(held) == 1
            recent = sum(n for at, n in counted if at > clock.now - WINDOW_SECONDS)
            assert recent < TEAM.decode_tokens_per_s * WINDOW_SECONDS


@pytest.mark.parametrize(
    ("uses", "pages", "within"),
    [
        ({}, 20, True), ({}, 21, True), ({"slots": 2, "pages": 10}, 10, True),
        ({"slots": 3}, 1, False), ({"slots": 1, "pages": 20}, 1, False), ({"live": 100}, 1, True),
    ],
    ids=str,
)  # fmt: skip
def test_slots_and_pages_are_hard_caps(uses, pages, within):
    tenants = Tenants([TEAM], clock=ManualClock())
    tenants.occupy(1, **uses)
    assert tenants.within_quota(1, pages) is within


@pytest.mark.parametrize("field", ["prefilled", "decoded"])
def test_a_rate_is_a_cap_until_it_leaves_the_window(field):
    clock = ManualClock(100.0)
    tenants = Tenants([replace(TEAM, prefill_tokens_per_s=10)], clock=clock)
    tenants.count(1, **{"prefilled": 0, "decoded": 0, field: 49})
    assert tenants.within_quota(1, 1)
    tenants.count(1, **{"prefilled": 0, "decoded": 0, field: 1})
    assert not tenants.within_quota(1, 1)
    clock.now = 104.999
    assert not tenants.within_quota(1, 1)
    clock.now = 105.1
    assert tenants.within_quota(1, 1)


def test_usage_is_what_was_occupied_and_counted():
    clock = ManualClock()
    tenants = Tenants([TEAM, LOCAL_TENANT], clock=clock)
    tenants.occupy(1, slots=2, pages=7, live=3)
    tenants.occupy(1, pages=-2)
    clock.now = 1.0
    tenants.count(1, prefilled=100, decoded=15)
    assert tenants.usage(1) == Usage(2, 5, 3, decode_tokens_per_s=3.0, prefill_tokens_per_s=20.0)
    assert tenants.usage(0) == Usage(0, 0, 0, 0.0, 0.0)


def test_the_dominant_share_is_the_largest_part_of_a_quota_by_weight():
    tenants = Tenants([TEAM, replace(TEAM, id=2, weight=4.0)], clock=ManualClock())
    for tenant, weight in ((1, 1.0), (2, 4.0)):
        assert tenants.dominant_share(tenant) == 0
        tenants.occupy(tenant, slots=1)
        assert tenants.dominant_share(tenant) == 1 / 3 / weight
        tenants.occupy(tenant, pages=10)
        assert tenants.dominant_share(tenant) == 0.5 / weight
        tenants.count(tenant, prefilled=10_000, decoded=45)
        assert tenants.dominant_share(tenant) == 0.5 / weight


def test_only_giving_back_the_last_slot_makes_a_tenant_slotless():
    clock = ManualClock(1.0)
    tenants = Tenants([TEAM], clock=clock)
    assert tenants.slotless_since(1) == -math.inf
    tenants.occupy(1, slots=2, pages=3, live=2)
    assert tenants.slotless_since(1) is None
    tenants.occupy(1, slots=-1)
    assert tenants.slotless_since(1) is None
    clock.now = 2.0
    tenants.occupy(1, slots=-1)
    clock.now = 3.0
    tenants.occupy(1, pages=-3, live=1)
    assert tenants.slotless_since(1) == 2.0


def test_a_changed_quota_is_in_force_at_once_and_takes_nothing_away():
    tenants = Tenants([TEAM], clock=ManualClock())
    tenants.occupy(1, slots=2, pages=2)
    assert tenants.within_quota(1, 1)
    tenants.put(replace(TEAM, max_slots=1))
    assert not tenants.within_quota(1, 1)
    assert tenants.usage(1).slots == 2
    assert tenants.dominant_share(1) == 2.0
    tenants.put(replace(TEAM, max_slots=3))
    assert tenants.within_quota(1, 1)


def test_a_tenant_with_live_requests_stays():
    tenants = Tenants([TEAM], clock=ManualClock())
    tenants.occupy(1, live=1)
    with pytest.raises(RequestError, match="tenant: 1 has 1 live requests"):
        tenants.remove(1)
    tenants.occupy(1, live=-1)
    tenants.remove(1)
    assert 1 not in tenants
    assert list(tenants) == []


class Interrupting(dict[int, int]):
    """Live requests whose reading is interrupted."""

    def get(self, *key: object) -> int:
        raise KeyboardInterrupt


def test_an_interrupt_while_an_engine_lets_go_forgets_no_tenant_with_requests():
    tenants = Tenants([TEAM], clock=ManualClock())
    tenants.occupy(TEAM.id, slots=1, pages=2, live=1, holder="engine")
    tenants.begin_removal(TEAM.id)
    with pytest.raises(KeyboardInterrupt):
        tenants.reset_holder("engine", Interrupting({TEAM.id: 1}))
    tenants.finish_removals()
    assert tenants.usage(TEAM.id).live == 1
    tenants.reset_holder("engine", {TEAM.id: 1})
    assert tenants.usage(TEAM.id)[:3] == (0, 0, 1)
    tenants.reset_holder("engine", {})
    tenants.finish_removals()
    assert not list(tenants)


@pytest.mark.parametrize(
    "call",
    [
        *(lambda tenants: tenants[9], lambda tenants: tenants.remove(9)),
        *(lambda tenants: tenants.occupy(9, live=1), lambda tenants: tenants.within_quota(9, 1)),
    ],
)
def test_an_unknown_tenant_is_named(call):
    with pytest.raises(RequestError, match="tenant: 9 is not known") as caught:
        call(Tenants(clock=ManualClock()))  # type: ignore[operator]
    assert caught.value.field == "tenant"


def test_bad_tenants_are_refused():
    clock = ManualClock()
    with pytest.raises(ConfigError, match="share id 1"):
        Tenants([TEAM, replace(TEAM, name="other")], clock=clock)
    with pytest.raises(ConfigError, match="weight"):
        Tenants([replace(TEAM, weight=0)], clock=clock)


def test_giving_back_what_is_not_held_is_found():
    """Negative control of the accounts: a slot given back twice does not pass unseen."""
    tenants = Tenants([TEAM], clock=ManualClock())
    tenants.occupy(1, slots=1)
    tenants.occupy(1, slots=-1)
    with pytest.raises(AssertionError, match="gave back twice"):
        tenants.occupy(1, slots=-1)


@pytest.mark.parametrize("own", QosClass)
@pytest.mark.parametrize("asked", [None, *QosClass])
def test_a_request_may_lower_its_class_and_not_raise_it(own, asked):
    tenants = Tenants([replace(TEAM, qos=own)], clock=ManualClock())
    served = tenants.class_of(Request(1, (1,), 1, tenant=TEAM.id, qos=asked))
    order = [QosClass.INTERACTIVE, QosClass.STANDARD, QosClass.BATCH]
    assert order.index(served) == max(order.index(own), order.index(asked or own))
    assert [qos.rank for qos in order] == [0, 1, 2]


def test_a_scope_is_forgotten_before_its_last_member_leaves():
    """Once for a change that is not interrupted; a group goes on while one of its members stays."""
    ended: list[tuple[str | int, ...]] = []
    one, two = Tenant(1, "one"), Tenant(2, "two", isolation_group=7)
    tenants = Tenants([one, two], clock=ManualClock(), forget=ended.append)
    first = tenants.scopes
    tenants.put(replace(one, isolation_group=7), replace(two, weight=2.0))
    assert ended == [("tenant", 1)]
    assert tenants.members(("group", 7)) == [1, "one", 2, "two"]
    tenants.remove(2)
    assert ended == [("tenant", 1)]
    assert tenants.scopes == {("group", 7): first["group", 7]}
    tenants.put(replace(two, id=3), one)
    assert ended == [("tenant", 1), ("group", 7)]
    assert tenants.scopes["group", 7] != first["group", 7]
    assert tenants.scopes["tenant", 1] != first["tenant", 1]
    tenants.remove(1)
    assert ended == [("tenant", 1), ("group", 7), ("tenant", 1)]
