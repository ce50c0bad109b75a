"""Who has a slot: placing sequences on slots and pages, growing, publishing and removing them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from contract.arithmetic import PAGE_TOKENS
from contract.types import Request
from reference.engine.options import EngineOptions
from reference.engine.sequence import RunningSequence, Sequence
from reference.limits import pages_for
from reference.memory.kv import KvMemory
from reference.runner import ModelRunner
from reference.sched.constraints import bias_records
from reference.sched.quantum import goal
from reference.sched.slots import SlotTable
from reference.sched.tenants import Tenants


class SlotManager:
    """The running sequences of one model, by slot in order of admission.

    Every change of slots and pages goes through here, so that table, memory and the tenants' use
    always agree. ``on_lost`` is called with every sequence that loses its slot.
    """

    def __init__(
        self,
        runner: ModelRunner,
        memory: KvMemory,
        tenants: Tenants,
        on_lost: Callable[[RunningSequence], None],
    ) -> None:
        self._runner = runner
        self._tenants = tenants
        self.memory = memory
        self.table = SlotTable(runner.limits)
        self.free_slots = deque(range(runner.limits.slots))
        self.running: dict[int, RunningSequence] = {}
        self.recurrent = runner.recurrent.slot_bytes > 0
        self.keeps_states = self.recurrent and runner.limits.saved_states > 0
        self._interval = whole_pages(runner.limits.state_interval + PAGE_TOKENS - 1)
        self._payers: set[int] = set()
        self._on_lost = on_lost

    def runs(self, active: RunningSequence) -> bool:
        """Whether it still has its slot."""
        return self.running.get(active.slot) is active

    def progress(self, active: RunningSequence) -> int:
        """Positions of a sequence that are computed and whose tokens the host knows."""
        return min(self.table.computed[active.slot], active.sequence.known)

    def protects(self, active: RunningSequence) -> bool:
        """Whether nobody may take its slot: it waited too long, and has not got on yet."""
        return (
            active.protected
            and not active.sequence.stalled
            and self.progress(active) < active.quantum
        )

    def quantum_of(self, sequence: Sequence) -> int:
        """How far a sequence that is placed now is to come before it has got on."""
        known = sequence.tokens[: sequence.known]
        begun = self.memory.match(sequence.scope, known, sequence.cacheable)
        return goal(sequence.reached, begun, sequence.end)

    def fits(
        self, sequence: Sequence, removal: Iterable[RunningSequence], quantum: int = 0
    ) -> bool:
        """Whether there are pages for a sequence up to its ``quantum``, within its tenant's quota,
        once ``removal`` are removed."""
        tenant = sequence.request.tenant
        left = [(p.sequence.request.tenant, p.pages) for p in removal]
        # One more for every running one: nobody comes in only to push somebody out.
        whole = sequence.pages_to(quantum) if quantum else pages_for(sequence.known)
        needed = whole + len(self.running) - len(left)
        if needed > self.memory.available(tenant, left):
            return False
        # Of pages they share with it, the tenant pays for those nobody else holds then.
        inherited = self.memory.held(tenant, left) - self.memory.held(tenant)
        begin = max(sequence.pages_to_begin, whole)
        return self._tenants.within_quota(tenant, begin + max(0, inherited))

    def place(
        self, sequence: Sequence, quantum: int = 0, *, protected: bool = False
    ) -> RunningSequence | None:
        """Give a sequence a slot, what is cached of it, and pages for what is known of it; one that
        is ``protected`` gets all pages it needs up to its ``quantum``, so that it asks nobody for
        some before.

        None where there is no slot or too few pages; nothing is changed then.
        """
        if not self.free_slots:
            return None
        tenant, memory = sequence.request.tenant, self.memory
        tokens = sequence.tokens[: sequence.known]
        slot = self.free_slots[0]
        most = sequence.cacheable
        whole = sequence.pages_to(quantum) if protected else pages_for(sequence.known)
        needed = whole + len(self.running)
        if not memory.fits(sequence.scope, tokens, most, needed, tenant):
            return None
        if protected and not self._tenants.within_quota(tenant, whole):
            return None
        hit = memory.adopt(sequence.scope, tokens, most, tenant, slot)
        pages = memory.take(whole - len(hit.pages), tenant, slot)
        assert pages is not None, "it fits"
        self.free_slots.popleft()
        active = RunningSequence(
            sequence,
            slot,
            [*hit.pages, *pages],
            quantum=quantum,
            protected=protected,
            matched=hit.matched,
            difference=hit.difference,
        )
        sequence.active = active
        self.running[slot] = active
        self._note_slots(sequence.request, 1)
        self._note_pages(tenant)
        self._occupy(active, hit.tokens)
        if hit.state is not None:
            self._runner.recurrent.load(hit.state, slot)
        return active

    def grow(self, active: RunningSequence, count: int) -> bool:
        """``count`` more pages; False where there are none for its tenant."""
        tenant = active.sequence.request.tenant
        pages = self.memory.take(count, tenant, active.slot)
        if pages is None:
            return False
        active.pages.extend(pages)
        self.table.add_pages(active.slot, pages)
        self._note_pages(tenant)
        return True

    def publish(self, active: RunningSequence) -> None:
        """Let others find the pages that are full of tokens the host knows."""
        sequence = active.sequence
        known = min(self.table.computed[active.slot], sequence.known)
        active.published = self.memory.publish(
            sequence.scope,
            sequence.tokens[:known],
            active.pages,
            active.published,
            sequence.request.tenant,
        )

    def keep_state(self, active: RunningSequence) -> None:
        """Save the recurrent state where the slot stands, at the end of a page, in the queue."""
        if not self.keeps_states:
            return
        tokens = self.table.computed[active.slot]
        place = self._place_for_state(active, self._gain_of_state(active, tokens))
        if place is not None:
            self._runner.recurrent.save(active.slot, place)
            active.states.append((tokens, place))
            if tokens < len(active.sequence.request.prompt):
                # Of a prompt: whoever asks with the same one goes on there, whatever is answered.
                self.publish(active)
                self._attach_state(active)
        self._next_cut(active)

    def keep_where_it_stands(self, active: RunningSequence) -> None:
        """Save the recurrent state of a sequence that is about to lose its slot, where it is one
        that others could find: after whole pages of tokens that the host knows."""
        computed = self.table.computed[active.slot]
        kept = max([tokens for tokens, _ in active.states], default=0)
        whole = computed % PAGE_TOKENS == 0 and kept < computed <= active.sequence.known
        if not self.keeps_states or not whole:
            return
        place = self._place_for_state(active)
        if place is not None:
            self._runner.recurrent.save(active.slot, place)
            active.states.append((computed, place))

    def remove(
        self, active: RunningSequence, *, served: bool = True, published: bool = True
    ) -> None:
        """Take the slot and the pages from a sequence; what it computed stays in the cache unless
        it is not to be ``published``. One that did not get on was not ``served``."""
        sequence, slot = active.sequence, active.slot
        self._on_lost(active)
        if published:
            self.publish(active)
            self._attach_state(active)
        for _, place in active.states:
            self.memory.drop_state_slot(place)
        if active.undo is not None:
            self.memory.drop_state_slot(active.undo)
        del self.running[slot]
        sequence.active = None
        self.free_slots.append(slot)
        self._note_slots(sequence.request, -1, served)
        self.memory.release(active.pages, sequence.request.tenant)
        # A page that others hold is paid for by one of them now.
        for tenant in tuple(self._payers):
            self._note_pages(tenant)

    def reset(self, live: Iterable[Sequence]) -> None:
        """Take everything from all ``live`` sequences after a fault, whatever was being done."""
        live = list(live)
        for active in self.running.values():
            self._on_lost(active)
        for sequence in live:
            sequence.active = None
        self.running.clear()
        self.free_slots = deque(range(len(self.table.computed)))
        self.memory.clear()
        self._payers.clear()
        self._tenants.let_go(self, Counter([sequence.request.tenant for sequence in live]))

    def _note_slots(self, request: Request, slots: int, served: bool = True) -> None:
        self._tenants.occupy(
            request.tenant, slots=slots, qos=request.qos, holder=self, served=served
        )

    def _note_pages(self, tenant: int) -> None:
        """Let the tenant's account say what is charged to it."""
        pages = self.memory.held(tenant)
        (self._payers.add if pages else self._payers.discard)(tenant)
        self._tenants.hold_pages(tenant, pages, self)

    def _occupy(self, active: RunningSequence, computed: int) -> None:
        sequence = active.sequence
        self.table.occupy(
            active.slot,
            computed=computed,
            known=sequence.known,
            # The last token of a sequence is sampled, not computed.
            end=max(sequence.known, sequence.last),
            sampling=sequence.request.sampling,
            rows_from=sequence.rows_from,
            scored_to=len(sequence.request.prompt) if sequence.on_scores is not None else 0,
            output=None if sequence.on_logits is None else sequence.output,
            samples=sequence.samples,
            lockstep=active.masked,
            bias=bias_records(sequence.request),
            listed=sequence.request.log_probabilities is not None,
        )
        self.table.add_pages(active.slot, active.pages)
        self.table.stalled[active.slot] = sequence.stalled
        if self.keeps_states:
            self._next_cut(active)

    def _next_cut(self, active: RunningSequence) -> None:
        """Choose the next position at which the recurrent state is saved.

        In a prompt these are: every ``state_interval`` tokens, so that an edit in the middle costs
        no more; the end of what was cached, since others who share it differ there too; the
        beginnings of turns; the last full page; and the position at which a protected sequence has
        got on and may lose its slot. Behind the prompt every page ends with one.
        """
        slot = active.slot
        computed, known = self.table.computed[slot], self.table.known[slot]
        end_of_prompt = whole_pages(known - 1)
        if computed < end_of_prompt:
            quantum = active.quantum if active.protected else 0
            cuts = [end_of_prompt, *self._lasting_cuts(active)]
            cuts += [self._interval * (computed // self._interval + 1)] if self._interval else []
            cuts += [quantum] if quantum % PAGE_TOKENS == 0 else []
            self.table.cut[slot] = min(cut for cut in cuts if cut > computed)
        else:
            self.table.cut[slot] = whole_pages(computed) + PAGE_TOKENS

    def _lasting_cuts(self, active: RunningSequence) -> list[int]:
        """Positions within a prompt, at the ends of pages, from which others are likely to go
        on."""
        return [active.matched, *map(whole_pages, active.sequence.request.turns)]

    def _gain_of_state(self, active: RunningSequence, tokens: int) -> int | None:
        """Tokens that a state in the middle of a prompt would save, None for one that is saved
        whatever others are worth."""
        if tokens >= whole_pages(active.sequence.known - 1) or tokens in self._lasting_cuts(active):
            return None
        return self._interval

    def _place_for_state(self, active: RunningSequence, gain: int | None = None) -> int | None:
        """A place for the next state of a sequence: beside one, since steps ahead may have computed
        tokens that the sequence never gets, or that of the older of two, since they compute less
        than a page."""
        if len(active.states) < 2:
            return self.memory.save_state_slot(gain)
        _, place = active.states.pop(0)
        return place

    def _attach_state(self, active: RunningSequence) -> None:
        """Let the latest state of tokens that the sequence got be found."""
        sequence, states = active.sequence, active.states
        active.states = []
        useful = [state for state in states if state[0] <= sequence.known][-1:]
        for tokens, place in states:
            if (tokens, place) in useful:
                self.memory.attach_state(sequence.scope, sequence.tokens[:tokens], place)
            else:
                self.memory.drop_state_slot(place)


def whole_pages(tokens: int) -> int:
    """As many tokens as the whole pages among ``tokens`` have."""
    return tokens // PAGE_TOKENS * PAGE_TOKENS


def memory_of(runner: ModelRunner, options: EngineOptions) -> KvMemory:
    """The pages and saved states of a runner."""
    limits = runner.limits
    copies = options.copy_pages or options.host_pages > 0
    return KvMemory(
        limits.pages,
        order=options.page_order,
        states=limits.saved_states if runner.recurrent.slot_bytes else None,
        cache=options.prefix_cache,
        cached_pages=options.cached_pages,
        copies=runner.page_copies() if copies else None,
        host_pages=options.host_pages,
    )
