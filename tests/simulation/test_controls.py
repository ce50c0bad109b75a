"""Every invariant fails when the part of the engine that keeps it is broken."""

import pytest

from harness.simulation.generate import MEMORY, SCHEDULER
from harness.simulation.invariants import Invariant
from harness.simulation.run import play_seed
from tests.simulation.controls import CONTROLS, Break

MAX_SEEDS = 150
TELLING = {
    "first_come_first_served": 41, "classes_reversed": 57, "the_model_used_last_makes_room": 82,
    "one_scope_for_all": 5, "a_decode_is_left_out": 2, "quotas_are_not_asked": 5,
    "stalled_ones_go_on": 4, "cancel_is_forgotten": 9, "masks_are_forgotten": 2,
    "biases_are_forgotten": 4, "logs_of_another_row": 15, "copies_do_nothing": 12,
    "saved_pages_do_not_come_back": 12, "states_are_not_loaded": 7,
    "the_cache_outlives_a_fault": 6, "the_usage_counts_twice": 3, "chance_decides": 4,
    "a_waiting_request_is_lost": 3, "one_tenant_may_take_all_places": 5,
    "the_first_model_goes_first": 5, "no_model_makes_room": 12,
}  # fmt: skip
"""The seed that notices a fault soonest: it is played before the others."""


def first_violation(broken: Break, twice: bool) -> Invariant | None:
    """What breaks first, in any of some seeds; seed 0 is also that of an unwatched competition."""
    for seed in (TELLING.get(broken.__name__, 1), *range(1, MAX_SEEDS + 1)):
        for profile in (SCHEDULER, MEMORY):
            violation = play_seed(profile, seed, twice=twice).violation
            if violation is not None:
                return violation.invariant
    return None


@pytest.mark.parametrize(
    ("invariant", "broken"),
    [(invariant, broken) for invariant, parts in CONTROLS.items() for broken in parts],
)
def test_a_broken_part_is_noticed(invariant, broken, monkeypatch):
    """As the invariant it breaks, not as some consequence."""
    broken(monkeypatch)
    assert first_violation(broken, invariant is Invariant.SAME_SEED_SAME_LOG) is invariant
