"""Clients that leave while the device computes, and that each part of what is undone is noticed."""

from collections.abc import Collection

import pytest

from harness.simulation.generate import LEAVING
from harness.simulation.invariants import Invariant
from harness.simulation.run import play_seed, run_schedules
from reference.engine.slot_manager import SlotManager
from reference.engine.step_cancels import StepCancels
from reference.memory.kv import KvMemory

Patch = pytest.MonkeyPatch
MAX_SEEDS = 300


@pytest.mark.parametrize(
    ("first", "schedules"), [(0, 40), pytest.param(40, 110, marks=pytest.mark.long)]
)
def test_nothing_breaks(first, schedules):
    """Abandoned steps change no other answer, and leave no page, slot or state behind."""
    report = run_schedules(LEAVING, first, schedules, jobs=1)
    assert report.failure is None, report.failure
    for what in ("abandoned", "faults", "prefix tokens_hit", "preemptions", "restarts"):
        assert report.counts[what] > 0, f"{what} never happens"
    assert report.counts["abandoned"] > schedules


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_nothing_breaks_for_long():
    report = run_schedules(LEAVING, 100_000, 50_000)
    assert report.failure is None, report.failure


def what_is_lost_is_found(patch: Patch) -> None:
    patch.setattr(SlotManager, "cut_back", lambda self, sequence, position: None)


def lost_pages_are_found(patch: Patch) -> None:
    patch.setattr(KvMemory, "unpublish", lambda self, scope, tokens, pages, first: None)


def a_page_too_few_is_forgotten(patch: Patch) -> None:
    unpublish = KvMemory.unpublish
    patch.setattr(
        KvMemory,
        "unpublish",
        lambda self, scope, tokens, pages, first: unpublish(self, scope, tokens, pages, first + 1),
    )


def steps_of_others_are_abandoned(patch: Patch) -> None:
    def broken(self: StepCancels, request_ids: Collection[int]) -> None:
        for step in self._awaited:
            step.token.cancel()

    patch.setattr(StepCancels, "add", broken)


@pytest.mark.parametrize(
    "broken",
    [
        what_is_lost_is_found,
        lost_pages_are_found,
        a_page_too_few_is_forgotten,
        steps_of_others_are_abandoned,
    ],
)
def test_a_broken_part_is_noticed(broken, monkeypatch):
    """As something that was read and not written, or by what never ends."""
    broken(monkeypatch)
    violations = (play_seed(LEAVING, seed, twice=False).violation for seed in range(MAX_SEEDS))
    found = next(filter(None, violations), None)
    assert found is not None, "nobody noticed"
    assert found.invariant in (Invariant.HISTORY, Invariant.TOKENS, Invariant.LIVENESS)


def test_what_was_found_of_an_abandoned_step_is_not_published():
    """A request is in an abandoned step itself, and began with pages of one before it that was
    abandoned, too."""
    assert play_seed(LEAVING, 118_237, twice=False).violation is None
