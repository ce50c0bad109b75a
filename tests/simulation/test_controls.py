"""Every invariant fails when the part of the engine that keeps it is broken."""

from __future__ import annotations

import pytest

from harness.simulation.generate import MEMORY, SCHEDULER
from harness.simulation.invariants import Invariant
from harness.simulation.run import play_seed
from tests.simulation.controls import CONTROLS, Break

MOST_SEEDS = 150


def first_violation(twice: bool) -> Invariant | None:
    """What breaks first, in any of some seeds; seed 0 is also that of an unwatched competition."""
    for seed in range(1, MOST_SEEDS + 1):
        for profile in (SCHEDULER, MEMORY):
            violation = play_seed(profile, seed, twice=twice).violation
            if violation is not None:
                return violation.invariant
    return None


@pytest.mark.parametrize(
    ("invariant", "broken"),
    [(invariant, broken) for invariant, parts in CONTROLS.items() for broken in parts],
)
def test_a_broken_part_is_noticed(
    invariant: Invariant, broken: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the invariant it breaks, not as some consequence."""
    broken(monkeypatch)
    assert first_violation(invariant is Invariant.SAME_SEED_SAME_LOG) is invariant
