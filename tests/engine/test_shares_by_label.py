"""A tenant's share is its own, whatever classes its requests ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count

import pytest

from contract.types import QosClass, Request, Tenant, TokenEvent
from harness.simulation import history
from tests.engine.adversaries import engine_of, until
from tests.simulation.test_adversaries import lines_age_separately

LABELS = (None, *QosClass)
WINDOW = 10.0
SECONDS = 60.0
BEGIN = 20.0

Labels = Callable[[int], QosClass | None]


def in_turn(number: int) -> QosClass | None:
    return LABELS[number % len(LABELS)]


def one_for_each_class(number: int) -> QosClass | None:
    return LABELS[number // 7 % len(LABELS)]


def none(number: int) -> QosClass | None:
    return None


@pytest.fixture(autouse=True)
def finite_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "NON_FINITE_ONE_IN", 1 << 62)


def worst_excess(
    labels: Labels, *, tenants: int, slots: int, tokens: int, qos: QosClass, cancels: bool = False
) -> float:
    """By how much tenant 0, whose requests ask for ``labels``, gets more of any WINDOW than the
    others on average would have, as a part of all tokens. Everybody always has work."""
    engine, clock = engine_of(
        *(Tenant(id, f"t{id}", qos=qos, max_slots=slots) for id in range(tenants)),
        slots=slots,
        pages=slots * 32,
    )
    numbers, live = count(1), Counter[int]()
    owner: dict[int, int] = {}
    delivered: list[tuple[float, int]] = []

    def refill() -> None:
        for tenant in range(tenants):
            while live[tenant] < 2 * slots:
                number = next(numbers)
                live[tenant] += 1
                owner[number] = tenant
                asked = labels(number) if tenant == 0 else None
                request = Request(
                    number, (number % 1000,), tokens, tenant=tenant, ignore_end=True, qos=asked
                )
                engine.submit(request)

    def each(events: list[TokenEvent]) -> None:
        for event in events:
            tenant = owner[event.request_id]
            delivered.append((clock(), tenant))
            live[tenant] -= event.finish_reason is not None
        if cancels and len(delivered) % 13 == 0:
            for number in [n for n, tenant in owner.items() if not tenant][-3:]:
                if not engine.progress(number) and engine._live.get(number):
                    engine.cancel(number)
                    live[0] -= 1
        refill()

    refill()
    until(engine, clock, SECONDS, each)
    worst, start = 0.0, BEGIN
    while start + WINDOW <= SECONDS:
        inside = [tenant for moment, tenant in delivered if start < moment <= start + WINDOW]
        worst = max(worst, inside.count(0) / len(inside) - 1 / tenants)
        start += 0.5
    return worst


@pytest.mark.parametrize("labels", [in_turn, one_for_each_class])
@pytest.mark.parametrize("qos", [QosClass.INTERACTIVE, QosClass.STANDARD])
@pytest.mark.parametrize(("tenants", "slots", "tokens"), [(4, 4, 150), (4, 8, 60), (16, 4, 6)])
@pytest.mark.parametrize("cancels", [False, True])
def test_labels_win_nothing(
    labels: Labels, qos: QosClass, tenants: int, slots: int, tokens: int, cancels: bool
) -> None:
    """Of equal tenants that always have work nobody gets 2 % more than its part of any 10 s."""
    excess = worst_excess(
        labels, tenants=tenants, slots=slots, tokens=tokens, qos=qos, cancels=cancels
    )
    assert excess <= 0.02


def test_where_slots_go_round_slowly_labels_win_nothing_either() -> None:
    """Sixteen tenants on four slots: 10 s hold a few turns of each, with labels or without."""
    alike, labelled = (
        worst_excess(labels, tenants=16, slots=4, tokens=60, qos=QosClass.STANDARD)
        for labels in (none, in_turn)
    )
    assert labelled <= alike + 0.002


def test_where_every_label_ages_alone_labels_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the lines of one tenant take turns as if they were tenants."""
    lines_age_separately(monkeypatch)
    excess = worst_excess(in_turn, tenants=16, slots=4, tokens=60, qos=QosClass.STANDARD)
    assert excess > 0.1
