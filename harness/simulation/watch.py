"""Reads an engine's state while it works, and passes it to the checks.

This is the only module of the simulation that uses an engine's private parts."""

from collections import deque
from collections.abc import Callable, Container, Iterable
from typing import Any

from contract.arithmetic import PAGE_TOKENS
from contract.types import FinishReason, QosClass, Request
from harness.simulation import checks
from harness.simulation.accounts import ExpectedCounts
from harness.simulation.invariants import Invariant, Violation, require
from harness.simulation.scopes import Scopes
from reference.engine import Engine
from reference.engine.sequence import Sequence
from reference.limits import pages_for
from reference.memory.prefix import scope_of, sharers
from reference.observer import Observer
from reference.runner import StepInput
from reference.sched.rates import WINDOW_SECONDS
from reference.sched.tenants import PART_OF_A_SLOT
from reference.sched.wait_queue import WaitingRequest

MAX_DECISIONS = 1000
"""Admissions, preemptions and submissions in one call of an engine; more is taken for an endless
loop."""
DEEP_CHECK_STEPS = 16
"""Steps between two checks of the whole memory."""


class EngineWatch(Observer):
    """Observes one engine on a runner with ``slot_scopes``; ``log`` receives its decisions.
    ``states`` gives the states of all engines that share its tenants, its own among them.

    ``running`` are the ids of the requests that have a slot, ``accounts`` what the usage should
    have. ``violation`` is the first one found while the engine worked; the engine may have
    recovered from it as from any other exception."""

    def __init__(
        self,
        clock: Callable[[], float],
        log: list[tuple[Any, ...]],
        states: Callable[[], list[checks.State]],
        scopes: Scopes,
    ) -> None:
        self.violation: Violation | None = None
        self.running: set[int] = set()
        self.accounts = ExpectedCounts()
        self._clock = clock
        self._log = log
        self._states = states
        self._scopes = scopes
        self._decisions = 0
        self._unfit: set[int] = set()
        self._looked = False
        self.interrupted = self.call_interrupted = False
        self._held_since: float | None = None
        self._counted_at: float | None = None
        self._engine: Any = None
        self._delivered: deque[tuple[float, int]] = deque()
        self._next: Callable[[Callable[[WaitingRequest], bool | None]], WaitingRequest | None]
        self._preempt: Callable[..., None]

    def attach(self, engine: Engine) -> None:
        """Look at ``engine`` from now on."""
        self._engine = engine
        scheduler = self._engine._scheduler
        self._next, self._preempt = scheduler.queue.next, scheduler.preempt
        scheduler.queue.next, scheduler.preempt = self._watched_next, self._watched_preempt

    def state(self) -> checks.State:
        """The engine's present state."""
        engine = self._engine
        slot_manager, memory = engine._slot_manager, engine.memory
        meta = memory.meta
        running = []
        for slot, sequence in slot_manager.running.items():
            request, stalled = sequence.request, sequence.stalled
            protected = slot_manager.protects(sequence)
            running.append(
                checks.Resident(
                    request.id, request.tenant, request.qos, slot, sequence.pages,
                    protected, stalled,
                )
            )  # fmt: skip
        return checks.State(
            len(slot_manager.table.computed),
            list(slot_manager.free_slots),
            running,
            [sequence.request.id for sequence in engine._scheduler.waiting.values()],
            list(engine._live),
            meta["ref_count"].tolist(),
            meta["tenant"].tolist(),
            memory.free,
            memory.cached,
        )

    def between_steps(self, step: int) -> None:
        """Check the engine's state. Raises Violation."""
        self._decisions = 0
        if not self._engine._consistent:
            # It was interrupted while it recovered, and recovers again in its next call.
            return
        state = self.state()
        checks.check_slots(state)
        checks.check_pages(state)
        self._check_gone()
        if step % DEEP_CHECK_STEPS == 0:
            self.deeply()

    def at_end(self) -> None:
        """Check an engine that is not used any more. Raises Violation."""
        self.deeply()
        self.accounts.keep_only(self._engine.tenants)
        self.accounts.compare(
            self._engine.usage, interrupted=self.interrupted, call_interrupted=self.call_interrupted
        )

    def request_in_order(self, order: int) -> int | None:
        """The id of the live request that was the engine's ``order``-th to arrive."""
        live = self._engine._live.items()
        return next((id for id, sequence in live if sequence.order == order), None)

    def live(self) -> list[int]:
        """Ids of the requests that wait or run."""
        return list(self._engine._live)

    def deeply(self) -> None:
        """Check the whole memory. Raises Violation."""
        try:
            self._engine.memory.check()
        except AssertionError as error:
            raise Violation(Invariant.PAGE_SUM, str(error)) from error

    def submitted_step(self, step: StepInput) -> None:
        """Check a step that was submitted to the runner. Raises Violation."""
        self._guarded(lambda: self._check_step(step))

    def admitted(self, at: float, request_id: int, slot: int, known: int, reused: int) -> None:
        self.running.add(request_id)
        self._log.append(("admitted", at, request_id, slot, known, reused))
        request = self._engine._live[request_id].request
        self.accounts.add(request.tenant, "slots_admitted")
        self._engine.runner.slot_scopes[slot] = self._scopes.number_of(request.tenant)
        self._guarded(lambda: self._check_admitted(request))

    def preempted(self, at: float, request_id: int, slot: int, known: int) -> None:
        self.running.discard(request_id)
        self.accounts.add(self._engine._live[request_id].request.tenant, "slots_preempted")
        self._log.append(("preempted", at, request_id, slot, known))

    def finished(self, at: float, request_id: int, slot: int | None, reason: FinishReason) -> None:
        self.running.discard(request_id)
        self._log.append(("finished", at, request_id, slot, reason.value))

    def keep_only(self, tenants: Container[int]) -> None:
        """Forget the counts of all other tenants."""
        self.accounts.keep_only(tenants)
        self._delivered = deque(each for each in self._delivered if each[1] in tenants)

    def hold(self) -> None:
        """Note that a step ended: what it handed out was counted when events began to wait, if any
        did, and in this step otherwise."""
        self._counted_at = self._held_since
        if not self._engine.has_events:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = self._clock()

    def delivered(self, tenant: int) -> None:
        """Note that a token of the tenant reached its client."""
        self.accounts.add(tenant, "tokens_generated")
        now = self._clock() if self._counted_at is None else self._counted_at
        self._delivered.append((now, tenant))

    def check_rest(self) -> None:
        """Raise Violation where an engine that was just advanced looked at those that wait and
        found nothing to compute or read, though one of them has room. Where it did not look,
        nothing it knows of has changed, and it looks within RETRY_SECONDS. A request that can never
        have room ends in the next step. Loads from disk end, so who waits for their room waits."""
        engine = self._engine
        if not engine._consistent:
            return
        unfit = {sequence.request.id for sequence in engine._scheduler.unfit} & set(self.live())
        again, self._unfit = unfit & self._unfit, unfit
        require(
            not again,
            Invariant.NEVER_IDLE,
            lambda: f"requests {again} can never have room, and wait",
        )
        looked, self._looked = self._looked, False
        loads = engine._disk is not None and engine._disk._loading
        if not looked or not engine.blocked or unfit or loads:
            return
        readings = {} if engine._disk is None else engine._disk._readings
        # One beyond its quotas keeps its line's turn, whatever is read for it.
        queue, quotas = engine._scheduler.queue._waiting, engine.tenants.within_quota
        reading = [
            order
            for order, one in readings.items()
            if not one.ready and order in queue and quotas(queue[order].tenant, queue[order].pages)
        ]
        able = [
            candidate.order
            for candidate in self._candidates(reading)
            if candidate.order not in readings and self._has_room(candidate)
        ]
        require(
            not able,
            Invariant.NEVER_IDLE,
            lambda: f"requests {able} by arrival have room, and nothing is computed",
        )

    def _has_room(self, candidate: checks.Candidate) -> bool:
        slot_manager = self._engine._slot_manager
        sequence = self._engine._scheduler.waiting[candidate.order]
        aged = candidate.aged or candidate.since is not None
        quantum_end = slot_manager.quantum_end_of(sequence) if aged else 0
        return bool(slot_manager.free_slots) and slot_manager.fits(sequence, [], quantum_end)

    def _check_gone(self) -> None:
        """Check that the engine has nothing of removed tenants, unless an interrupt has kept it
        from following the latest change."""
        engine = self._engine
        if engine._changes._followed != engine.tenants.changes:
            return
        tenants = {tenant.id: tenant for tenant in engine.tenants}
        scopes = {scope_of(tenant) for tenant in tenants.values()}
        left = [scope for scope, _ in engine.memory._trees.scopes() if sharers(scope) not in scopes]
        counted = [id for id in engine.usage.tenants if id not in tenants]
        reserved = engine.memory.reservations.pages
        there = sum(engine.tenants.reservations.values())
        require(
            not left and not counted and reserved == there,
            Invariant.GONE,
            lambda: f"of scopes {left}, in the usage {counted}, {reserved} pages reserved",
        )

    def _guarded(self, check: Callable[[], None]) -> None:
        """Run a check inside a call of the engine, and count it against MAX_DECISIONS."""
        try:
            self._decisions += 1
            if self._decisions >= MAX_DECISIONS:
                raise Violation(
                    Invariant.LIVENESS, f"{MAX_DECISIONS} decisions in one call of the engine"
                )
            check()
        except Violation as violation:
            self.violation = self.violation or violation
            raise

    def _check_step(self, step: StepInput) -> None:
        counts: dict[int, int] = {}
        written: dict[tuple[int, int], None] = {}
        for _, slot, position, _ in step.query.tolist():
            counts[slot] = counts.get(slot, 0) + 1
            written[slot, position // PAGE_TOKENS] = None
        running = list(self._running_sequences())
        checks.check_decodes(running, counts)
        engine, decodes = self._engine, any(p.decodes and p.slot in counts for p in running)
        allowed = engine.chunk_while_decoding if decodes else engine.chunk_tokens
        drafted = self._engine._slot_manager.table.draft
        prefill = sum([n for slot, n in counts.items() if n > 1 and not drafted[slot]])
        if prefill > allowed:
            raise Violation(Invariant.STEP_CAP, f"{prefill} prefill tokens, {allowed} allowed")
        meta, table = self._engine.memory.meta, step.page_table
        references, whole = meta["ref_count"], meta["token_count"]
        for entry in written:
            page = table[entry]
            if references[page] != 1 or whole[page]:
                raise Violation(
                    Invariant.PAGE_REFERENCES,
                    f"page {page}, {meta[page]}, is written though others may read it",
                )

    def _running_sequences(self) -> Iterable[checks.RunningRequest]:
        """Positions that may be computed for each request that has a slot."""
        slot_manager = self._engine._slot_manager
        table = slot_manager.table
        computed, known, end, lockstep = table.computed, table.known, table.end, table.lockstep
        for slot, sequence in slot_manager.running.items():
            decodes = not lockstep[slot] and known[slot] <= computed[slot] < end[slot]
            yield checks.RunningRequest(sequence.request.id, slot, decodes, sequence.stalled)

    def _check_admitted(self, request: Request) -> None:
        tenant = self._engine.tenants[request.tenant]
        horizon = self._clock() - WINDOW_SECONDS
        while self._delivered and self._delivered[0][0] <= horizon:
            self._delivered.popleft()
        delivered = sum(id == tenant.id for _, id in self._delivered) / WINDOW_SECONDS
        usage = self._engine.tenants.usage(tenant.id)
        decode_rate = max(delivered, usage.decode_tokens_per_s)
        checks.check_quota(self._states(), tenant, decode_rate, usage.prefill_tokens_per_s)

    def _watched_next(self, fits: Callable[[WaitingRequest], bool | None]) -> WaitingRequest | None:
        """Check the queue's choice against all candidates."""
        self._looked = True
        candidates = list(self._candidates())
        without_room, reading = [], set[int]()

        def asked(waiting: WaitingRequest) -> bool | None:
            has_room = fits(waiting)
            if has_room is None:
                reading.add(waiting.order)
                candidates[:] = self._candidates(reading)
            elif not has_room:
                without_room.append(waiting.order)
            return has_room

        chosen = self._next(asked)
        order = None if chosen is None else chosen.order
        self._guarded(lambda: checks.check_admission(order, candidates, without_room))
        return chosen

    def _watched_preempt(self, sequence: Sequence, **how: bool) -> None:
        """Check a preemption against the state before it."""
        states = self._states()
        leaver = next(r for r in self.state().slot_manager if r.slot == sequence.slot)
        tenants = {tenant.id: tenant for tenant in self._engine.tenants}
        growth = pages_for(self._engine.runner.limits.step_tokens)
        if not how:
            self._guarded(
                lambda: checks.check_preemption(leaver, self.state(), states, tenants, growth)
            )
        self._preempt(sequence, **how)

    def _candidates(self, reading: Container[int] = ()) -> Iterable[checks.Candidate]:
        """The first request of each line whose pages are not read from disk, where it is within its
        tenant's quotas."""
        engine = self._engine
        queue, tenants = engine._scheduler.queue, engine.tenants
        heads: dict[tuple[int, QosClass | None], WaitingRequest] = {}
        for waiting in queue._waiting.values():
            key = waiting.tenant, waiting.qos
            head = heads.get(key)
            if waiting.order not in reading and (head is None or waiting.order < head.order):
                heads[key] = waiting
        within = [head for head in heads.values() if tenants.within_quota(head.tenant, head.pages)]
        # A single candidate is compared with no other.
        states = self._states() if len(within) > 1 else []
        for head in within:
            id, asked = head.tenant, head.qos
            share, recent = self._shares(id, states) if states else (0.0, 0.0)
            since, own = queue.line_aged_since(id, asked), tenants[id].qos
            qos = own.lowered_to(asked) if since is None else own
            yield checks.Candidate(head.order, id, queue.tenant_aged(id), since, qos, share, recent)

    def _shares(self, id: int, states: list[checks.State]) -> tuple[float, float]:
        """The largest part of its quotas that the tenant uses, and the slots it held recently,
        divided by its weight."""
        tenant, recent = self._engine.tenants[id], self._engine.tenants.recent_slots(id)
        slots = [one.tenant for state in states for one in state.slot_manager].count(id)
        part = max(
            min(max(slots, recent * tenant.weight), slots + PART_OF_A_SLOT) / tenant.max_slots,
            sum(state.charged(id) for state in states) / tenant.max_kv_pages,
        )
        return part / tenant.weight, recent
