"""Tenants alike get equal shares, however differently they ask."""

import pytest

from harness.simulation.fairness import check_shares, play_mix
from harness.simulation.invariants import Violation
from harness.simulation.run import violation_of
from reference.sched.tenants import Tenants


@pytest.mark.parametrize("seed", range(12))
def test_equal_shares_of_any_five_seconds(seed):
    play_mix(seed)


@pytest.mark.soak
def test_equal_shares_in_many_mixes():
    assert [seed for seed in range(1000, 1200) if violation_of(play_mix, seed)] == []


def test_arrival_alone_is_not_fair(monkeypatch):
    """Negative control: who has many requests waiting gets the slot that is left over."""
    for what in ("dominant_share", "recent_slots"):
        monkeypatch.setattr(Tenants, what, lambda self, tenant: 0.0)
    violations = [violation_of(play_mix, seed) for seed in range(3)]
    assert any(found is not None and "FAIRNESS" in str(found) for found in violations)


def test_the_measure_sees_one_unfair_window():
    """Ten fair seconds do not outweigh five that are not."""
    fair = [(0.01 * number, number % 2) for number in range(1200)]
    check_shares(fair, 2, 0.0, 12.0)
    unfair = fair[:1000] + [(moment, 0) for moment, _ in fair[1000:]]
    with pytest.raises(Violation, match="FAIRNESS"):
        check_shares(unfair, 2, 0.0, 12.0)
