"""Gives slots and pages to the running sequences, extends, publishes and takes them back."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from contract.arithmetic import PAGE_TOKENS
from reference.engine.options import EngineOptions
from reference.engine.sequence import Sequence
from reference.limits import pages_for
from reference.memory.kv import KvMemory
from reference.memory.page_copies import PageCopies
from reference.memory.prefix import NO_TREE_OBSERVER
from reference.runner import ModelRunner
from reference.sched.constraints import bias_records
from reference.sched.quantum import end_of_quantum
from reference.sched.slots import SlotTable
from reference.sched.tenants import Tenants

if TYPE_CHECKING:
    from reference.engine.disk_pages import DiskPages


class SlotManager:
    """The running sequences of one model by slot, in order of admission.

    All changes of slots and pages are made here, so that slot table, memory and tenants' accounts
    agree. ``on_lost`` is called with every sequence that loses its slot. ``disk`` has pages that
    are not in memory."""

    def __init__(
        self,
        runner: ModelRunner,
        memory: KvMemory,
        tenants: Tenants,
        on_lost: Callable[[Sequence], None],
        disk: DiskPages | None = None,
    ) -> None:
        self._runner = runner
        self._tenants = tenants
        self.memory, self.disk = memory, disk
        self.table = SlotTable(runner.limits)
        self.free_slots = deque(range(runner.limits.slots))
        self.running: dict[int, Sequence] = {}
        self.recurrent = runner.recurrent.slot_bytes > 0
        self.keeps_states = self.recurrent and runner.limits.saved_states > 0
        self._interval = whole_pages(runner.limits.state_interval + PAGE_TOKENS - 1)
        self._payers: set[int] = set()
        self._on_lost = on_lost

    def progress(self, sequence: Sequence) -> int:
        """The number of computed positions of a running sequence whose tokens the host knows."""
        return min(self.table.computed[sequence.slot], sequence.known)

    def protects(self, sequence: Sequence) -> bool:
        """Whether a running sequence, which had waited too long, keeps its slot to make
        progress."""
        return (
            sequence.protected
            and not sequence.stalled
            and self.progress(sequence) < sequence.quantum_end
        )

    def quantum_end_of(self, sequence: Sequence) -> int:
        """The number of positions at which a sequence admitted now has made progress."""
        known = sequence.tokens[: sequence.known]
        begun = self.memory.match(sequence.scope, known, sequence.cacheable)
        return end_of_quantum(sequence.max_computed, begun, sequence.end)

    def fits(self, sequence: Sequence, removal: Iterable[Sequence], quantum_end: int = 0) -> bool:
        """Whether there are pages for a sequence up to ``quantum_end``, within its tenant's quota,
        once the running sequences in ``removal`` are removed."""
        left = [(other.tenant, other.pages) for other in removal]
        # One more for every running sequence, so that the admission does not cause a preemption.
        whole = sequence.pages_to(quantum_end) if quantum_end else pages_for(sequence.known)
        needed = whole + len(self.running) - len(left)
        if needed > self.memory.available(sequence.tenant, left):
            return False
        # Shared pages that only the removed sequences hold are charged to the tenant then.
        inherited = self.memory.held(sequence.tenant, left) - self.memory.held(sequence.tenant)
        begin = max(sequence.pages_to_begin, whole)
        return self._tenants.within_quota(sequence.tenant, begin + max(0, inherited))

    def admit(self, sequence: Sequence, quantum_end: int = 0, *, protected: bool = False) -> bool:
        """Give a sequence a slot, the cached pages of its tokens, and pages for the rest of them. A
        ``protected`` sequence gets all pages up to ``quantum_end``, so that it preempts nobody
        before that.

        False if there is no slot or there are too few pages; then nothing is changed."""
        if not self.free_slots:
            return False
        tenant, memory = sequence.tenant, self.memory
        tokens = sequence.tokens[: sequence.known]
        slot = self.free_slots[0]
        limit = sequence.cacheable
        whole = sequence.pages_to(quantum_end) if protected else pages_for(sequence.known)
        needed = whole + len(self.running)
        if protected and not self._tenants.within_quota(tenant, whole):
            return False
        hit = memory.adopt(sequence.scope, tokens, limit, tenant, slot, needed)
        if hit is None:
            return False
        taken = memory.take(whole - len(hit.pages), tenant, slot)
        assert taken is not None, "it fits"
        pages = [*hit.pages, *taken]
        if self.disk is not None:
            hit = self.disk.load(sequence, memory, hit, pages)
        self.free_slots.popleft()
        sequence.begin(slot, pages, hit, quantum_end, protected)
        self.running[slot] = sequence
        self._note_slots(sequence, 1)
        self._note_pages(tenant)
        self._occupy(sequence, hit.tokens)
        self.table.loading[slot] = self.disk is not None and self.disk.is_loading(sequence)
        if hit.state is not None:
            self._runner.recurrent.load(hit.state, slot)
        return True

    def load_more(self, *, whole: bool) -> list[Sequence]:
        """Load pages that were read from disk, see ``DiskPages.load_more``. Returns the sequences
        that have all their pages now."""
        loaded = [] if self.disk is None else self.disk.load_more(self.memory, whole=whole)
        for sequence, hit in loaded:
            slot = sequence.slot
            sequence.matched, sequence.from_disk = hit.matched, hit.from_disk
            self.table.computed[slot], self.table.loading[slot] = hit.tokens, False
            if self.keeps_states:
                self._next_branch_point(sequence)
            if hit.from_disk and hit.state is not None:
                self._runner.recurrent.load(hit.state, slot)
        return [sequence for sequence, _ in loaded]

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Give a sequence ``count`` more pages; False if none are available to its tenant."""
        pages = self.memory.take(count, sequence.tenant, sequence.slot)
        if pages is None:
            return False
        sequence.pages.extend(pages)
        self.table.add_pages(sequence.slot, pages)
        self._note_pages(sequence.tenant)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Let other sequences find the pages that are full of tokens the host knows."""
        known = self.progress(sequence)
        sequence.published = self.memory.publish(
            sequence.scope,
            sequence.tokens[:known],
            sequence.pages,
            sequence.published,
            sequence.tenant,
        )

    def save_state(self, sequence: Sequence, tokens: int) -> None:
        """Queue a copy of the slot's recurrent state after ``tokens`` tokens, which end a page."""
        if not self.keeps_states:
            return
        state_slot = self._state_slot_for(sequence, self._gain_of_state(sequence, tokens))
        if state_slot is not None:
            self._runner.recurrent.save(sequence.slot, state_slot, tokens)
            sequence.states.append((tokens, state_slot))
            if tokens < len(sequence.request.prompt):
                # A state inside the prompt serves every request with the same prompt.
                self.publish(sequence)
                self._attach_state(sequence)
        self._next_branch_point(sequence)

    def save_last_state(self, sequence: Sequence) -> None:
        """Save the recurrent state of a sequence that is about to lose its slot, if others could
        find it: after whole pages of tokens that the host knows."""
        computed = self.table.computed[sequence.slot]
        saved = max([tokens for tokens, _ in sequence.states], default=0)
        whole = computed % PAGE_TOKENS == 0 and saved < computed <= sequence.known
        if not self.keeps_states or not whole:
            return
        state_slot = self._state_slot_for(sequence)
        if state_slot is not None:
            self._runner.recurrent.save(sequence.slot, state_slot)
            sequence.states.append((computed, state_slot))

    def cut_back(self, sequence: Sequence, position: int) -> None:
        """Let nobody find what was computed of a sequence from ``position`` on."""
        known = self.progress(sequence)
        self.memory.unpublish(
            sequence.scope, sequence.tokens[:known], sequence.pages, position // PAGE_TOKENS
        )
        for tokens, state_slot in sequence.states:
            if tokens > position:
                self.memory.drop_state_slot(state_slot)
        sequence.states = [state for state in sequence.states if state[0] <= position]
        self.table.computed[sequence.slot] = min(position, self.table.computed[sequence.slot])

    def remove(self, sequence: Sequence, *, served: bool = True, published: bool = True) -> None:
        """Take slot and pages from a sequence. Its computed pages stay in the cache if
        ``published``. ``served`` False: it made no progress."""
        slot, pages = sequence.slot, sequence.pages
        self._on_lost(sequence)
        if self.disk is not None:
            self.disk.drop(sequence)
        if published:
            self.publish(sequence)
            self._attach_state(sequence)
        for _, state_slot in sequence.states:
            self.memory.drop_state_slot(state_slot)
        del self.running[slot]
        sequence.slot = -1
        self.free_slots.append(slot)
        self._note_slots(sequence, -1, served)
        self.memory.release(pages, sequence.tenant)
        if self.disk is not None and sequence.published is not None:
            self.disk.used(sequence.published.node)
        # A shared page may be charged to another holder now.
        for tenant in tuple(self._payers):
            self._note_pages(tenant)

    def reset(self, live: Iterable[Sequence]) -> None:
        """Take everything from all ``live`` sequences after a fault, whatever was in progress."""
        live = list(live)
        for sequence in self.running.values():
            self._on_lost(sequence)
        for sequence in live:
            sequence.slot, sequence.looked_up = -1, False
        self.running.clear()
        self.free_slots = deque(range(len(self.table.computed)))
        self.memory.clear()
        if self.disk is not None:
            self.disk.clear()
        self._payers.clear()
        self._tenants.reset_holder(self, Counter([sequence.tenant for sequence in live]))

    def _note_slots(self, sequence: Sequence, slots: int, served: bool = True) -> None:
        self._tenants.occupy(
            sequence.tenant, slots=slots, qos=sequence.request.qos, holder=self, served=served
        )

    def _note_pages(self, tenant: int) -> None:
        """Set the pages of a tenant's account to those charged to it."""
        pages = self.memory.held(tenant)
        (self._payers.add if pages else self._payers.discard)(tenant)
        self._tenants.set_pages(tenant, pages, self)

    def _occupy(self, sequence: Sequence, computed: int) -> None:
        request = sequence.request
        self.table.occupy(
            sequence.slot,
            computed=computed,
            known=sequence.known,
            end=sequence.end,
            sampling=request.sampling,
            rows_from=sequence.rows_from,
            scored_to=sequence.scored_to,
            output=None if sequence.on_logits is None else sequence.output,
            samples=sequence.samples,
            lockstep=sequence.masked,
            bias=bias_records(request),
            listed=request.log_probabilities is not None,
            adapters=self._runner.model.adapters.used(request.adapters),
        )
        self.table.add_pages(sequence.slot, sequence.pages)
        self.table.stalled[sequence.slot] = sequence.stalled
        if self.keeps_states:
            self._next_branch_point(sequence)

    def _next_branch_point(self, sequence: Sequence) -> None:
        """Set the position at which the next recurrent state is saved.

        In a prompt these are: every ``state_interval`` tokens, so that an edit in the middle costs
        no more; the end of the cached part, where others who share it differ too; the beginnings of
        turns; the last full page; and the quantum of a protected sequence, which may lose its slot
        there. After the prompt, the end of every page."""
        slot = sequence.slot
        computed, known = self.table.computed[slot], self.table.known[slot]
        end_of_prompt = whole_pages(known - 1)
        if computed < end_of_prompt:
            quantum_end = sequence.quantum_end if sequence.protected else 0
            cuts = [end_of_prompt, *self._branch_points(sequence)]
            cuts += [self._interval * (computed // self._interval + 1)] if self._interval else []
            cuts += [quantum_end] if quantum_end % PAGE_TOKENS == 0 else []
            self.table.cut[slot] = min(cut for cut in cuts if cut > computed)
        else:
            self.table.cut[slot] = whole_pages(computed) + PAGE_TOKENS

    def _branch_points(self, sequence: Sequence) -> list[int]:
        """Page ends within a prompt at which other prompts are likely to differ."""
        return [sequence.matched, *map(whole_pages, sequence.request.turns)]

    def _gain_of_state(self, sequence: Sequence, tokens: int) -> int | None:
        """Tokens that a state amid a prompt would save; None for a state that is always saved."""
        if tokens >= whole_pages(sequence.known - 1) or tokens in self._branch_points(sequence):
            return None
        return self._interval

    def _state_slot_for(self, sequence: Sequence, gain: int | None = None) -> int | None:
        """A state slot for the next state of a sequence. A sequence has at most two: steps ahead
        may compute less than a page of tokens that it never gets, so of two earlier states only the
        newer is needed."""
        if len(sequence.states) < 2:
            return self.memory.save_state_slot(gain)
        _, state_slot = sequence.states.pop(0)
        return state_slot

    def _attach_state(self, sequence: Sequence) -> None:
        """Let other sequences find the latest state within the known tokens."""
        states, sequence.states = sequence.states, []
        useful = [state for state in states if state[0] <= sequence.known][-1:]
        for tokens, state_slot in states:
            if (tokens, state_slot) in useful:
                self.memory.attach_state(sequence.scope, sequence.tokens[:tokens], state_slot)
            else:
                self.memory.drop_state_slot(state_slot)


def whole_pages(tokens: int) -> int:
    """``tokens`` rounded down to whole pages."""
    return tokens // PAGE_TOKENS * PAGE_TOKENS


def copies_of(
    runner: ModelRunner, options: EngineOptions, disk: DiskPages | None
) -> PageCopies | None:
    """The copies of pages that an engine with these options makes; None if it makes none."""
    needed = options.copy_pages or options.host_pages > 0 or disk is not None
    return runner.page_copies() if needed else None


def memory_of(
    runner: ModelRunner, options: EngineOptions, disk: DiskPages | None = None
) -> KvMemory:
    """The pages and saved states of a runner; ``disk`` is notified of every change of the cache.
    A model without attention has no keys and values to save in host memory."""
    limits, copies = runner.limits, copies_of(runner, options, disk)
    return KvMemory(
        limits.pages,
        order=options.page_order,
        states=limits.saved_states if runner.recurrent.slot_bytes else None,
        cache=options.prefix_cache,
        cached_pages=options.cached_pages,
        copies=copies,
        host_pages=0 if copies is None else options.host_pages,
        observer=NO_TREE_OBSERVER if disk is None else disk,
    )
