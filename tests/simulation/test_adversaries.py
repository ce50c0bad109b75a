"""The engine among adversaries, and that each fault they once found is found when it is back."""

from collections.abc import Callable

import pytest

from harness.simulation.contests import play_flood
from harness.simulation.generate import ADVERSARY
from harness.simulation.invariants import Invariant
from harness.simulation.run import play_seed, run_schedules, violation_of
from harness.simulation.shares import play_shares
from reference.engine.output_processor import OutputProcessor
from reference.engine.scheduler import Scheduler
from reference.engine.sequence import Sequence
from reference.engine.tenant_changes import TenantChanges
from reference.memory.kv import KvMemory
from reference.model.adapters import Adapters
from reference.sched.quantum import QUANTUM

Patch = pytest.MonkeyPatch
MAX_SEEDS = 400
TELLING = (53, 48)
"""Seeds that notice faults which few do: they are played first."""
HAPPENS = (
    *("interrupts", "interrupted calls", "reservations refused", "cancels", "faults"),
    *("preemptions", "competitions", "prefixes saved", "prefixes loaded", "disk read"),
)


@pytest.mark.parametrize(
    ("first", "schedules"), [(0, 41), pytest.param(41, 60, marks=pytest.mark.long)]
)
def test_nothing_breaks(first, schedules):
    report = run_schedules(ADVERSARY, first, schedules, jobs=1)
    assert report.failure is None, report.failure
    for what in HAPPENS:
        assert report.counts[what] > 0, f"{what} never happens"


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_nothing_breaks_for_long():
    report = run_schedules(ADVERSARY, 100_000, 100_000)
    assert report.failure is None, report.failure


@pytest.mark.parametrize("seed", range(4))
def test_cheats_and_floods_win_nothing(seed):
    play_shares(seed)
    play_flood(seed)


def scopes_outlive_their_tenants(patch: Patch) -> None:
    patch.setattr(KvMemory, "forget_others", lambda self, scopes, tenants: None)


def who_moves_goes_on_in_its_old_scope(patch: Patch) -> None:
    patch.setattr(TenantChanges, "_move_scope", lambda self, sequence, ended: None)


def what_can_never_fit_waits(patch: Patch) -> None:
    patch.setattr(Scheduler, "_can_ever_fit", lambda self, sequence: True)


def who_is_in_between_is_lost(patch: Patch) -> None:
    rebuild = Scheduler.rebuild

    def found(self: Scheduler, live: list[Sequence], *, fault: bool) -> None:
        known = {p.order for p in self.slot_manager.running.values()} | {*self.waiting}
        rebuild(self, [each for each in live if each.order in known], fault=fault)

    patch.setattr(Scheduler, "rebuild", found)


def dropped_events_count(patch: Patch) -> None:
    """Tokens are counted when they are sampled, not when they are handed out."""
    append = OutputProcessor._append

    def counted(self: OutputProcessor, event: object, tenant: int) -> None:
        append(self, event, tenant)  # type: ignore[arg-type]
        self.count()
        self._batches[-1].before.clear()

    patch.setattr(OutputProcessor, "_append", counted)


def adapters_share_pages(patch: Patch) -> None:
    patch.setattr(Adapters, "identity", lambda self, scales: ())


CONTROLS: list[tuple[Callable[[Patch], None], set[Invariant]]] = [
    (scopes_outlive_their_tenants, {Invariant.GONE, Invariant.PAGE_ISOLATION}),
    (who_moves_goes_on_in_its_old_scope, {Invariant.GONE, Invariant.PAGE_ISOLATION}),
    (what_can_never_fit_waits, {Invariant.NEVER_IDLE, Invariant.LIVENESS}),
    (who_is_in_between_is_lost, {Invariant.SLOT_OWNER, Invariant.LIVENESS}),
    (dropped_events_count, {Invariant.USAGE}),
    (adapters_share_pages, {Invariant.HISTORY, Invariant.TOKENS}),
]


@pytest.mark.parametrize(
    ("broken", "noticed"), CONTROLS, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_fault_that_is_back_is_noticed(broken, noticed, monkeypatch):
    broken(monkeypatch)
    found = None
    for seed in (*TELLING, *range(1, MAX_SEEDS)):
        if seed % 50 == 0:
            continue
        violation = play_seed(ADVERSARY, seed).violation
        if violation is not None:
            found = violation
            break
    assert found is not None
    assert found.invariant in noticed, found


def test_a_quantum_of_nothing_is_noticed(monkeypatch):
    """Negative control: QUANTUM positions beyond those found in the cache, as if none were lost."""
    for module in ("slot_manager", "scheduler"):
        monkeypatch.setattr(
            f"reference.engine.{module}.end_of_quantum", lambda reached, begun, end: begun + QUANTUM
        )
    found = (violation_of(play_flood, seed) for seed in range(12))
    assert any(each is not None and each.invariant is Invariant.PROGRESS for each in found)
