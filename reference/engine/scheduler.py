"""Who runs next, in one file: who waits, who is admitted, who grows, who is preempted, and the
chunk of each sequence in the next step.

``next_chunks`` is the order in which this is decided before every step. Each decision is a policy,
a function or a class of ``reference.sched``:

    admit    wait_queue.WaitQueue      the next of the waiting requests, by class, share and age
    preempt  wait_queue.choose_victim  the running sequence that makes room
             quantum.end_of_quantum    the positions computed before a sequence can lose its slot
    chunks   planner.plan_step         the tokens of the step
             budget.prefill_tokens     its prompt tokens, by what steps cost (cost.StepCost)
    quotas   tenants.Tenants           what each tenant may use, and uses

``SlotManager`` carries out what is decided: it gives and takes slots and pages."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

from contract.lazy_dataclass import dataclass
from contract.types import Clock, FinishReason, QosClass, Request
from reference.engine.options import EngineOptions
from reference.engine.sequence import Sequence
from reference.engine.slot_manager import SlotManager
from reference.engine.speculative_decoder import SpeculativeDecoder
from reference.limits import Limits, pages_for
from reference.observer import Observer
from reference.sched.cost import StepCost
from reference.sched.planner import (
    Chunk,
    Pending,
    plan_step,
    prefill_tokens,
    remaining_tokens,
    split_by_phase,
)
from reference.sched.quantum import end_of_quantum
from reference.sched.tenants import Tenants
from reference.sched.wait_queue import RunningRequest, WaitingRequest, WaitQueue, choose_victim
from reference.usage import UsageCounters

RETRY_SECONDS = 0.05
"""Seconds after which waiting requests are looked at again: ages and rates change."""
INTERVAL_RATIO = {QosClass.INTERACTIVE: 1.15, QosClass.STANDARD: 3.0}
"""How many times as long as its decoding alone a step with prefill may take while a sequence of the
class decodes (see ``prefill_tokens``). Batch work sets no bound."""


@dataclass(slots=True)
class SchedulerCounts:
    """Counts of events since the engine began."""

    admitted: int = 0
    preempted: int = 0


class Scheduler:
    """Decides who waits and who runs, and what the next step computes.

    ``waiting`` are the waiting sequences by order of arrival; those that are not stalled are in the
    ``queue``. ``unfit`` are those that can never have room, since others reserved too many pages:
    they are no candidates, and end before the next step. ``chunk_tokens`` is the most prefill
    tokens of a step, ``chunk_while_decoding`` the most in a step that also decodes."""

    def __init__(
        self,
        limits: Limits,
        options: EngineOptions,
        slot_manager: SlotManager,
        tenants: Tenants,
        clock: Clock,
        observer: Observer,
        usage: UsageCounters,
        cost: StepCost,
        speculative: SpeculativeDecoder | None,
    ) -> None:
        limit = limits.step_tokens - limits.slots
        self.chunk_tokens = min(options.chunk_tokens or limit, limit)
        self.chunk_while_decoding = min(options.chunk_while_decoding or limit, self.chunk_tokens)
        self.slot_manager = slot_manager
        self.queue = WaitQueue(tenants, clock=clock)
        self.waiting: dict[int, Sequence] = {}
        self.unfit: list[Sequence] = []
        self.counts = SchedulerCounts()
        self._limits = limits
        self._tenants = tenants
        self._clock = clock
        self._observer = observer
        self._usage = usage
        self._cost = cost
        self._speculative = speculative
        self._changed = False
        self._retry_at = 0.0

    # The order: before every step.

    def next_chunks(self) -> list[Chunk]:
        """Decide the next step: admit waiting sequences, draft tokens, divide the step among the
        running sequences, and give each the pages for its chunk. If a sequence is preempted for a
        page, the step is divided again. Empty if there is nothing to compute."""
        chunks = self._decide()
        if not chunks and self.due:
            # It was the only sequence with work; another may have room now.
            chunks = self._decide()
        return chunks

    def _decide(self) -> list[Chunk]:
        self.admit()
        if self._speculative is not None:
            while not self.grow(self._speculative.next_positions()):
                pass
            self._speculative.draft()
        chunks = self.chunks()
        while chunks and not self.grow(chunks):
            chunks = self.chunks()
        return chunks

    # Waiting.

    @property
    def due(self) -> bool:
        """Whether the waiting sequences should be looked at now."""
        return bool(self.waiting) and (self._changed or self._clock() >= self._retry_at)

    def enqueue(self, sequence: Sequence, since: float | None = None) -> None:
        """Let a sequence wait, from now on or as if since ``since`` seconds. A preempted sequence
        keeps its order of arrival."""
        sequence.since = self._clock() if since is None else since
        self.waiting[sequence.order] = sequence
        self._push(sequence)

    def _push(self, sequence: Sequence) -> None:
        fits = self._can_ever_fit(sequence)
        if not fits:
            self.unfit.append(sequence)
        if fits and not sequence.stalled:
            request, pages = sequence.request, sequence.pages_to_begin
            self.queue.push(
                WaitingRequest(sequence.order, request.tenant, sequence.since, pages, request.qos)
            )
        self._changed = True

    def set_stalled(self, sequence: Sequence, stalled: bool) -> None:
        """Record that a sequence's consumer stopped or resumed taking tokens. A stalled sequence
        computes nothing: it is no candidate for a slot, and blocks no other."""
        if sequence.stalled == stalled:
            return
        sequence.stalled = stalled
        if sequence.running:
            self.slot_manager.table.stalled[sequence.slot] = stalled
        elif stalled:
            self.queue.remove(sequence.order)
            self._changed = True
        else:
            self._push(sequence)

    def recheck_waiting(self) -> None:
        """Look at the waiting sequences before the next step: pages for one were read from disk."""
        self._changed = True

    def check_room(self) -> None:
        """Find the waiting sequences that can never have room, after reservations changed."""
        before, self.unfit = self.unfit, []
        for sequence in self.waiting.values():
            if not self._can_ever_fit(sequence):
                self.queue.remove(sequence.order)
                self.unfit.append(sequence)
            elif sequence in before:
                self._push(sequence)
        self._changed = True

    def _can_ever_fit(self, sequence: Sequence) -> bool:
        limit = self.slot_manager.memory.reservations.max_for(sequence.tenant)
        return pages_for(sequence.max_positions) <= limit

    def withdraw(self, sequence: Sequence) -> None:
        """Remove a sequence from its slot or the queue."""
        if sequence.running:
            self.slot_manager.remove(sequence)
            self._changed = True
        elif self.waiting.pop(sequence.order, None) is not None:
            self.queue.remove(sequence.order)

    def finished(self, sequence: Sequence, reason: FinishReason) -> None:
        """Remove a sequence that ended."""
        slot = sequence.slot if sequence.running else None
        self.withdraw(sequence)
        if self.slot_manager.disk is not None:
            self.slot_manager.disk.drop(sequence)
        self.queue.ended(sequence.order)
        self._observer.finished(self._clock(), sequence.request.id, slot, reason)

    def rebuild(self, live: Items[Sequence], *, fault: bool) -> None:
        """Let all ``live`` sequences wait with an empty cache, after a fault or an interrupt at any
        point. The sequences that ran count a ``fault``."""
        now = self._clock()
        for sequence in live:
            if sequence.order not in self.waiting:
                sequence.faults += fault
                sequence.since = now
        self.slot_manager.reset(live)
        self.waiting = {sequence.order: sequence for sequence in live}
        self.unfit = []
        self.queue.clear()
        for sequence in live:
            self._push(sequence)

    # Admitting.

    def admit(self) -> bool:
        """Give slots to the waiting sequences that may run now, preempting others if the policy
        says so. Returns whether any was admitted."""
        if not self.due:
            return False
        self._changed = False
        before = self.counts.admitted
        while (chosen := self.queue.next(self._try)) is not None:
            del self.waiting[chosen.order]
        self._retry_at = self._clock() + RETRY_SECONDS
        return self.counts.admitted > before

    def _try(self, waiting: WaitingRequest) -> bool | None:
        """Admit a waiting sequence if room is there or can be made. None while its pages are
        read."""
        sequence, slot_manager = self.waiting[waiting.order], self.slot_manager
        disk = slot_manager.disk
        if disk is not None and disk.is_reading(sequence, slot_manager.memory, self._limits.slots):
            return None
        # A tenant that has a slot is no longer aged.
        aged = self.queue.aged(waiting.tenant, waiting.qos)
        quantum_end = slot_manager.quantum_end_of(sequence) if aged else 0
        if not slot_manager.admit(sequence, quantum_end, protected=aged):
            victims = self._victims_for(sequence, quantum_end, aged)
            if not victims:
                return False
            for running in victims:
                self.preempt(running)
            admitted = slot_manager.admit(sequence, quantum_end, protected=aged)
            assert admitted, "there is no room where room was made"
        computed = slot_manager.table.computed[sequence.slot]
        if not aged:
            sequence.quantum_end = end_of_quantum(sequence.max_computed, computed, sequence.end)
        self.counts.admitted += 1
        sequence.admitted = self.counts.admitted
        self._usage.admitted(sequence.tenant)
        if not slot_manager.table.loading[sequence.slot]:
            self._usage.looked_up(sequence.tenant, sequence.known, computed)
        self._note_pages(sequence.tenant)
        if sequence.difference is not None:
            self._observer.differed(self._clock(), sequence.request.id, sequence.difference)
        if sequence.from_disk:
            self._observer.loaded(self._clock(), sequence.request.id, sequence.from_disk)
        self._observer.admitted(
            self._clock(), sequence.request.id, sequence.slot, sequence.known, computed
        )
        return True

    def load_more(self, *, whole: bool) -> bool:
        """Load pages read from disk for sequences with slots: at most a block each, or with
        ``whole`` all that arrived. Returns whether a sequence has all of its pages now."""
        loaded = self.slot_manager.load_more(whole=whole)
        for sequence in loaded:
            computed = self.slot_manager.table.computed[sequence.slot]
            if not sequence.protected:
                sequence.quantum_end = end_of_quantum(sequence.max_computed, computed, sequence.end)
            self._usage.looked_up(sequence.tenant, sequence.known, computed)
            if sequence.from_disk:
                self._observer.loaded(self._clock(), sequence.request.id, sequence.from_disk)
        return bool(loaded)

    def _note_pages(self, tenant: int) -> None:
        self._usage.holds(tenant, self._tenants.held(tenant)[1])

    # Growing.

    def grow(self, chunks: Items[Chunk]) -> bool:
        """Give every chunk's sequence the pages it needs. False if a sequence was preempted for
        them; then the step is divided again."""
        slot_manager = self.slot_manager
        for chunk, count in zip(chunks, slot_manager.table.missing_pages(chunks), strict=True):
            if not count:
                continue
            sequence = slot_manager.running[chunk.slot]
            if self._beyond_quota(sequence, count) or not slot_manager.grow(sequence, count):
                self._make_room(sequence, count)
                return False
            self._note_pages(sequence.tenant)
        return True

    def _make_room(self, sequence: Sequence, count: int) -> None:
        """Preempt one sequence so that ``sequence`` can grow, itself if there is no other.
        Protected sequences already have the pages they need, and stay."""
        candidates = [each for each in self._candidates() if not each.protected]
        if self._beyond_quota(sequence, count):
            candidates = [c for c in candidates if c.tenant == sequence.tenant]
        chosen = choose_victim(candidates, self._tenants, None)
        self.preempt(sequence if chosen is None else self.slot_manager.running[chosen.slot])

    def _beyond_quota(self, sequence: Sequence, count: int) -> bool:
        """Whether ``count`` more pages exceed the tenant's quota. The only running request of a
        tenant may have what it needs, as at its admission."""
        slots, pages = self._tenants.held(sequence.tenant)
        return slots > 1 and pages + count > self._tenants[sequence.tenant].max_kv_pages

    # Preempting.

    def preempt(self, sequence: Sequence, *, published: bool = True) -> None:
        """Let a running sequence wait again with all the tokens that the host knows. If it made no
        progress in its slot, it counts as having waited all the time. Its computed pages stay in
        the cache if ``published``."""
        slot_manager, slot = self.slot_manager, sequence.slot
        progress = slot_manager.progress(sequence)
        served = progress >= sequence.quantum_end or sequence.stalled
        sequence.max_computed = max(sequence.max_computed, progress)
        if published:
            slot_manager.save_last_state(sequence)
        slot_manager.remove(sequence, served=served, published=published)
        self.counts.preempted += 1
        self._usage.preempted(sequence.tenant)
        self._observer.preempted(self._clock(), sequence.request.id, slot, sequence.known)
        self.enqueue(sequence, None if served else sequence.since)

    def _victims_for(self, sequence: Sequence, quantum_end: int, aged: bool) -> list[Sequence]:
        """The sequences to preempt so that ``sequence`` can be admitted: none, or enough. An aged
        sequence claims room as a request of its tenant's own class, and first from stalled
        sequences, whatever their class."""
        slot_manager = self.slot_manager
        claimant = self._tenants.class_of(sequence.request)
        stalled: list[Sequence] = []
        if aged:
            claimant = self._tenants[sequence.tenant].qos
            stalled = [other for other in slot_manager.running.values() if other.stalled]
        slots = {other.slot for other in stalled}
        candidates = [c for c in self._candidates(claimant) if c.slot not in slots]
        if not candidates and not stalled:
            return []
        free = len(slot_manager.free_slots)
        victims: list[Sequence] = []
        while free + len(victims) < 1 or not slot_manager.fits(sequence, victims, quantum_end):
            if stalled:
                victims.append(stalled.pop())
                continue
            chosen = choose_victim(candidates, self._tenants, claimant)
            if chosen is None:
                return []
            candidates.remove(chosen)
            victims.append(slot_manager.running[chosen.slot])
        return victims

    def _candidates(self, claimant: QosClass | None = None) -> list[RunningRequest]:
        """The running sequences as ``choose_victim`` compares them; with ``claimant``, those of
        lower classes only."""
        above = -1 if claimant is None else claimant.rank
        found = []
        for slot, sequence in self.slot_manager.running.items():
            qos = self._tenants.class_of(sequence.request)
            if qos.rank > above:
                protected = self.slot_manager.protects(sequence)
                pages = len(sequence.pages)
                found.append(
                    RunningRequest(sequence.order, sequence.tenant, qos, slot, pages, protected)
                )
        return found

    # Chunks.

    def chunks(self) -> list[Chunk]:
        """Divide the next step among the running sequences: every decoding one, then as much
        prefill as the budget and the rows of a step allow."""
        slot_manager, table = self.slot_manager, self.slot_manager.table
        pending = table.pending(slot_manager.running)
        chunks = plan_step(pending, self._prefill_tokens(pending))
        if slot_manager.keeps_states:
            chunks = table.at_page_ends(chunks)
        return table.within_rows(chunks, self._limits.step_rows)

    def _prefill_tokens(self, pending: Items[Pending]) -> int:
        """The prefill tokens of a step that keep the decode interval of its most urgent class.

        It is spread if only sequences of lower classes wait for it."""
        decoding, prefilling = split_by_phase(pending)
        if not decoding or not prefilling:
            return self.chunk_tokens
        limit = self._limits.step_tokens - remaining_tokens(decoding)
        running = self.slot_manager.running
        ratio = self._least_ratio([running[one.slot].request for one in decoding])
        max_tokens = min(self.chunk_while_decoding, limit)
        spread = self._least_ratio([running[one.slot].request for one in prefilling]) > ratio
        return prefill_tokens(pending, self._cost, ratio, max_tokens, spread=spread)

    def _least_ratio(self, requests: Items[Request]) -> float:
        """The least INTERVAL_RATIO of the requests' classes, infinite for batch work."""
        classes = {(request.tenant, request.qos): request for request in requests}
        served = map(self._tenants.class_of, classes.values())
        return min([INTERVAL_RATIO.get(qos, math.inf) for qos in served])
