"""Who waits and who runs: admission, making room, preemption. Every decision is the policy's
(``reference.sched``); this carries it out."""

from __future__ import annotations

from collections.abc import Sequence as Items

from contract.lazy_dataclass import dataclass
from contract.types import Clock, FinishReason, QosClass
from reference.engine.sequence import RunningSequence, Sequence
from reference.engine.slot_manager import SlotManager
from reference.ledger import Ledger
from reference.limits import pages_for
from reference.observer import Observer
from reference.sched.admission import RunningRequest, WaitingRequest, WaitQueue, victim
from reference.sched.planner import Chunk
from reference.sched.quantum import goal
from reference.sched.tenants import Tenants

RETRY_SECONDS = 0.05
"""How soon one that found no room is looked at again though nobody left: ages and rates change."""


@dataclass(slots=True)
class SchedulerCounts:
    """How often something happened since the engine began."""

    admitted: int = 0
    preempted: int = 0


class Scheduler:
    """The sequences that wait, and the residents they become. ``unfit`` are those that wait and
    would never have room: others have reserved too much."""

    def __init__(
        self,
        slot_manager: SlotManager,
        tenants: Tenants,
        queue: WaitQueue,
        clock: Clock,
        observer: Observer,
        ledger: Ledger,
    ) -> None:
        self.slot_manager = slot_manager
        self.waiting: dict[int, Sequence] = {}
        self.unfit: list[Sequence] = []
        self.counts = SchedulerCounts()
        self._tenants = tenants
        self._queue = queue
        self._clock = clock
        self._observer = observer
        self._ledger = ledger
        self._changed = False
        self._retry_at = 0.0

    @property
    def due(self) -> bool:
        """Whether somebody who waits should be looked at now."""
        return bool(self.waiting) and (self._changed or self._clock() >= self._retry_at)

    def enqueue(self, sequence: Sequence, since: float | None = None) -> None:
        """Let a sequence wait, from now or as if ``since`` then; one that was here before keeps its
        turn."""
        sequence.since = self._clock() if since is None else since
        self.waiting[sequence.order] = sequence
        self._push(sequence)

    def _push(self, sequence: Sequence) -> None:
        request, pages = sequence.request, sequence.pages_to_begin
        waiting = WaitingRequest(sequence.order, request.tenant, sequence.since, pages, request.qos)
        self._queue.push(waiting)
        self._changed = True
        if not self._fits_ever(sequence):
            self.unfit.append(sequence)

    def check_room(self) -> None:
        """Find those that wait and would never have room, after a change of reservations."""
        self.unfit = [s for s in self.waiting.values() if not self._fits_ever(s)]
        self._changed = True

    def _fits_ever(self, sequence: Sequence) -> bool:
        most = self.slot_manager.memory.reservations.most_for(sequence.request.tenant)
        return pages_for(sequence.reach) <= most

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        if sequence.active is not None:
            self.slot_manager.remove(sequence.active)
            self._changed = True
        elif self.waiting.pop(sequence.order, None) is not None:
            self._queue.remove(sequence.order)

    def admit(self) -> bool:
        """Place whoever may come in now, preempting where the policy says so; whether anybody
        was."""
        if not self.due:
            return False
        self._changed = False
        before = self.counts.admitted
        while (chosen := self._queue.next(self._try)) is not None:
            del self.waiting[chosen.order]
        self._retry_at = self._clock() + RETRY_SECONDS
        return self.counts.admitted > before

    def grow(self, chunks: Items[Chunk]) -> bool:
        """Give every chunk's sequence the pages it needs; False where somebody had to leave for
        them, and the step is to be planned anew."""
        slot_manager = self.slot_manager
        for chunk, count in zip(chunks, slot_manager.table.missing_pages(chunks), strict=True):
            if not count:
                continue
            active = slot_manager.running[chunk.slot]
            if self._beyond_quota(active, count) or not slot_manager.grow(active, count):
                self._make_room(active, count)
                return False
            self._note_pages(active.sequence.request.tenant)
        return True

    def preempt(self, active: RunningSequence, *, published: bool = True) -> None:
        """Send a sequence back to wait with all the tokens the host knows; where it did not get on
        in its slot it has waited all the time. What it computed stays in the cache unless it is
        not to be ``published``."""
        sequence, slot_manager = active.sequence, self.slot_manager
        progress = slot_manager.progress(active)
        served = progress >= active.quantum or sequence.stalled
        sequence.reached = max(sequence.reached, progress)
        if published:
            slot_manager.keep_where_it_stands(active)
        slot_manager.remove(active, served=served, published=published)
        self.counts.preempted += 1
        self._ledger.preempted(sequence.request.tenant)
        self._observer.preempted(self._clock(), sequence.request.id, active.slot, sequence.known)
        self.enqueue(sequence, None if served else sequence.since)

    def rebuild(self, live: Items[Sequence], *, fault: bool) -> None:
        """After a fault or an interrupt, whatever was being done: all ``live`` sequences wait, and
        nothing is cached. Those that ran count a ``fault``."""
        now = self._clock()
        for sequence in live:
            if sequence.order not in self.waiting:
                sequence.faults += fault
                sequence.since = now
        self.slot_manager.reset(live)
        self.waiting = {sequence.order: sequence for sequence in live}
        self.unfit = []
        self._queue.clear()
        for sequence in live:
            self._push(sequence)

    def finished(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take out a sequence that ended."""
        slot = None if sequence.active is None else sequence.active.slot
        self.withdraw(sequence)
        self._queue.ended(sequence.order)
        self._observer.finished(self._clock(), sequence.request.id, slot, reason)

    def _try(self, waiting: WaitingRequest) -> bool:
        """Place one that waits, if there is room or it can be made."""
        sequence = self.waiting[waiting.order]
        # Who has a slot is not aged any more.
        aged = self._queue.aged(waiting.tenant, waiting.qos)
        quantum = self.slot_manager.quantum_of(sequence) if aged else 0
        active = self.slot_manager.place(sequence, quantum, protected=aged)
        if active is None:
            victims = self._victims_for(sequence, quantum, aged)
            if not victims:
                return False
            for running in victims:
                self.preempt(running)
            active = self.slot_manager.place(sequence, quantum, protected=aged)
            assert active is not None, "there is no room where room was made"
        computed = self.slot_manager.table.computed[active.slot]
        if not aged:
            active.quantum = goal(sequence.reached, computed, sequence.end)
        self.counts.admitted += 1
        tenant = sequence.request.tenant
        self._ledger.admitted(tenant)
        self._ledger.looked_up(tenant, sequence.known, computed)
        self._note_pages(tenant)
        if active.difference is not None:
            self._observer.differed(self._clock(), sequence.request.id, active.difference)
        self._observer.admitted(
            self._clock(), sequence.request.id, active.slot, sequence.known, computed
        )
        return True

    def _note_pages(self, tenant: int) -> None:
        self._ledger.holds(tenant, self._tenants.usage(tenant).pages)

    def _victims_for(self, sequence: Sequence, quantum: int, aged: bool) -> list[RunningSequence]:
        """Whom to preempt so that ``sequence`` comes in: nobody, or enough. One that is aged claims
        room as a request of its tenant's own class, and takes it from those whose consumers have
        stalled first, whatever they are."""
        slot_manager, tenant = self.slot_manager, sequence.request.tenant
        claimant = self._tenants.class_of(sequence.request)
        stalled: list[RunningSequence] = []
        if aged and not sequence.stalled:
            claimant = self._tenants[tenant].qos
            stalled = [p for p in slot_manager.running.values() if p.sequence.stalled]
        slots = {active.slot for active in stalled}
        candidates = [c for c in self._candidates(claimant) if c.slot not in slots]
        if not candidates and not stalled:
            return []
        free = len(slot_manager.free_slots)
        victims: list[RunningSequence] = []
        while free + len(victims) < 1 or not slot_manager.fits(sequence, victims, quantum):
            if stalled:
                victims.append(stalled.pop())
                continue
            chosen = victim(candidates, self._tenants, claimant)
            if chosen is None:
                return []
            candidates.remove(chosen)
            victims.append(slot_manager.running[chosen.slot])
        return victims

    def _make_room(self, active: RunningSequence, count: int) -> None:
        """Preempt one sequence so that ``active`` can grow, itself if there is no other. Those
        that are protected have the pages they need, and stay."""
        candidates = [each for each in self._candidates() if not each.protected]
        if self._beyond_quota(active, count):
            tenant = active.sequence.request.tenant
            candidates = [c for c in candidates if c.tenant == tenant]
        chosen = victim(candidates, self._tenants, None)
        self.preempt(active if chosen is None else self.slot_manager.running[chosen.slot])

    def _beyond_quota(self, active: RunningSequence, count: int) -> bool:
        """Whether so many more pages are above the tenant's quota; the only request of a tenant
        may have what it needs, as at its admission."""
        tenant = active.sequence.request.tenant
        usage, most = self._tenants.usage(tenant), self._tenants[tenant].max_kv_pages
        return usage.slots > 1 and usage.pages + count > most

    def _candidates(self, claimant: QosClass | None = None) -> list[RunningRequest]:
        """Who runs, of the classes below that of a claimant if there is one."""
        above = -1 if claimant is None else claimant.rank
        found = []
        for slot, active in self.slot_manager.running.items():
            sequence = active.sequence
            qos = self._tenants.class_of(sequence.request)
            if qos.rank > above:
                protected = self.slot_manager.protects(active)
                tenant, pages = sequence.request.tenant, len(active.pages)
                found.append(RunningRequest(sequence.order, tenant, qos, slot, pages, protected))
        return found
