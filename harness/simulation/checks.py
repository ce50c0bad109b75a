"""The invariants of an engine's state, as functions of plain data that do not depend on engines."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from contract.types import QosClass, Tenant
from harness.simulation.invariants import Invariant, Violation, require


class Resident(NamedTuple):
    """A request that has a slot and pages, and ``asked`` for a class. It is ``protected`` if it had
    waited too long and has not made progress; it has ``stalled`` if its consumer takes no
    tokens."""

    request_id: int
    tenant: int
    asked: QosClass | None
    slot: int
    pages: Sequence[int]
    protected: bool = False
    stalled: bool = False


class RunningRequest(NamedTuple):
    """What may be computed for a request that has a slot. It ``decodes`` when the device samples
    its next token; it has ``stalled`` if its consumer takes no tokens."""

    request_id: int
    slot: int
    decodes: bool
    stalled: bool


class State(NamedTuple):
    """The state of an engine between two steps. For each page, ``references`` is its number of
    holders, and ``payers`` is the tenant it is charged to."""

    slots: int
    free_slots: Sequence[int]
    slot_manager: Sequence[Resident]
    waiting: Collection[int]
    live: Collection[int]
    references: Sequence[int]
    payers: Sequence[int]
    free_pages: int
    cached_pages: int

    def charged(self, tenant: int) -> int:
        """Pages charged to the tenant."""
        pairs = zip(self.references, self.payers, strict=True)
        return [payer for count, payer in pairs if count].count(tenant)


class Candidate(NamedTuple):
    """The first of the waiting requests of a tenant that ask for the same class. ``order`` is its
    number in the order of arrival. ``aged`` says that the tenant waits without a slot for too long;
    ``since`` is the time since which these requests do, None if that is not too long. ``qos`` is
    the class by which it is chosen; ``share`` and ``recent`` are the tenant's dominant share and
    recent slots by weight."""

    order: int
    tenant: int
    aged: bool
    since: float | None
    qos: QosClass
    share: float
    recent: float


def check_slots(state: State) -> None:
    """Check that every slot is free or has one request, and every live request either runs or
    waits."""
    slots = [*(resident.slot for resident in state.slot_manager), *state.free_slots]
    if len(slots) != state.slots or len(set(slots)) != state.slots:
        raise Violation(
            Invariant.SLOT_OWNER, f"taken or free are slots {sorted(slots)} of {state.slots}"
        )
    running = [resident.request_id for resident in state.slot_manager]
    together = len(running) + len(state.waiting)
    if together != len(state.live) or {*running, *state.waiting} != set(state.live):
        raise Violation(
            Invariant.SLOT_OWNER,
            f"running {running} and waiting {list(state.waiting)} are not the live "
            f"{list(state.live)}",
        )


def check_pages(state: State) -> None:
    """Check that a page's references are its holders, that every page is free, cached or held, and
    that a held page is charged to a tenant that holds it."""
    referrers = [0] * len(state.references)
    paid: set[int] = set()
    for resident in state.slot_manager:
        for page in resident.pages:
            referrers[page] += 1
            if state.payers[page] == resident.tenant:
                paid.add(page)
    if referrers != state.references:
        page = next(p for p, n in enumerate(referrers) if n != state.references[p])
        raise Violation(
            Invariant.PAGE_REFERENCES,
            f"page {page} counts {state.references[page]} references, {referrers[page]} have it",
        )
    held = len(referrers) - referrers.count(0)
    require(
        state.free_pages + held + state.cached_pages == len(referrers),
        Invariant.PAGE_SUM,
        lambda: (
            f"{state.free_pages} free, {held} held and {state.cached_pages} cached of "
            f"{len(referrers)}"
        ),
    )
    require(
        len(paid) == held,
        Invariant.PAGE_REFERENCES,
        lambda: f"{held} pages are held, {len(paid)} charged to one that holds them",
    )


def check_decodes(running: Iterable[RunningRequest], computed: Collection[int]) -> None:
    """Check that a step for the slots ``computed`` has every sequence that decodes, and computes
    nothing for a consumer that takes no tokens."""
    for request_id, slot, decodes, stalled in running:
        if stalled and slot in computed:
            raise Violation(Invariant.BACKPRESSURE, f"request {request_id} is computed")
        if decodes and not stalled and slot not in computed:
            raise Violation(
                Invariant.EVERY_DECODE, f"request {request_id} in slot {slot} is left out"
            )


def check_quota(
    states: Sequence[State], tenant: Tenant, decode_rate: float, prefill_rate: float
) -> None:
    """Check that ``tenant`` is within its quotas in all engines together, just after an admission.
    Rates are tokens a second over the window.

    The only running request of a tenant may have the pages it needs, since its quota may have been
    lowered after its submission."""
    own = [one for state in states for one in state.slot_manager if one.tenant == tenant.id]
    pages = sum(state.charged(tenant.id) for state in states)
    require(
        len(own) <= tenant.max_slots
        and (pages <= tenant.max_kv_pages or len(own) == 1)
        and decode_rate < tenant.decode_tokens_per_s
        and prefill_rate < tenant.prefill_tokens_per_s,
        Invariant.QUOTA,
        lambda: (
            f"tenant {tenant.id} was admitted to {len(own)} slots and {pages} pages at "
            f"{decode_rate:g} and {prefill_rate:g} tokens/s; allowed are {tenant.max_slots}, "
            f"{tenant.max_kv_pages}, {tenant.decode_tokens_per_s} and "
            f"{tenant.prefill_tokens_per_s}"
        ),
    )


def check_admission(
    chosen: int | None, candidates: Sequence[Candidate], without_room: Collection[int]
) -> None:
    """Check that ``chosen`` is the right one of ``candidates``, each of which is the first of its
    line whose pages are not read from disk, and within its quotas. For those ``without_room`` the
    engine found none."""
    picked = next((c for c in candidates if c.order == chosen), None)
    require(
        chosen is None or picked is not None,
        Invariant.ADMISSION_ORDER,
        lambda: f"{chosen} was admitted before its turn within its tenant, or beyond its quota",
    )
    aged = [c for c in candidates if c.aged]
    if aged:
        if picked is None:
            return
        if not picked.aged:
            raise Violation(
                Invariant.ADMISSION_ORDER, f"{chosen} passed {aged}, which waited too long"
            )
        own = [c for c in aged if c.tenant == picked.tenant]
        first = min(own, key=lambda c: (_waited(c), c.qos.rank, c.order))
        require(
            picked is first,
            Invariant.ADMISSION_ORDER,
            lambda: f"{picked} was admitted before {first} of its tenant",
        )
        return
    passed_over = [c for c in candidates if c is not picked and c.order not in without_room]
    for other in passed_over:
        if picked is None or _turn(picked, candidates) >= _turn(other, candidates):
            raise Violation(Invariant.ADMISSION_ORDER, f"{picked} was admitted before {other}")


def _waited(candidate: Candidate) -> float:
    return math.inf if candidate.since is None else candidate.since


def _turn(candidate: Candidate, candidates: Sequence[Candidate]) -> tuple[float, ...]:
    own = (c for c in candidates if (c.tenant, c.qos) == (candidate.tenant, candidate.qos))
    first = min(c.order for c in own)
    share, recent = candidate.share, candidate.recent
    return candidate.qos.rank, share, recent, first, _waited(candidate), candidate.order


def check_preemption(
    leaver: Resident,
    state: State,
    states: Sequence[State],
    tenants: Mapping[int, Tenant],
    growth: int,
) -> None:
    """Check that ``leaver`` may be preempted; ``state``, one of all ``states``, is the one before.
    An interactive request may be preempted in three cases: all running requests are interactive or
    protected; its tenant is at its page quota, where a request grows by at most ``growth`` pages at
    once; or its consumer takes no tokens."""

    def interactive(resident: Resident) -> bool:
        qos = tenants[resident.tenant].qos.lowered_to(resident.asked)
        return qos is QosClass.INTERACTIVE

    if not interactive(leaver) or leaver.stalled:
        return
    others = [r for r in state.slot_manager if not interactive(r) and not r.protected]
    pages = sum(state.charged(leaver.tenant) for state in states)
    require(
        not others or pages + growth > tenants[leaver.tenant].max_kv_pages,
        Invariant.INTERACTIVE_STAYS,
        lambda: f"request {leaver.request_id} was preempted, though {others[:1]} ran",
    )
