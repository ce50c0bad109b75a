"""Who has a slot: placing sequences on slots and pages, growing, publishing and removing them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from contract.arithmetic import PAGE_TOKENS
from contract.types import QosClass, Request
from reference.engine.sequence import RunningSequence, Sequence
from reference.limits import pages_for
from reference.memory.kv import KvMemory
from reference.runner import HIDDEN, ModelRunner
from reference.sched.constraints import bias_records
from reference.sched.slots import SlotTable
from reference.sched.tenants import Tenants


class SlotManager:
    """The running sequences of one model, by slot in order of admission.

    Every change of slots and pages goes through here, so that table, memory and the tenants' use
    always agree.
    """

    def __init__(self, runner: ModelRunner, memory: KvMemory, tenants: Tenants) -> None:
        self._runner = runner
        self._tenants = tenants
        self.memory = memory
        self.table = SlotTable(runner.limits)
        self.free_slots = deque(range(runner.limits.slots))
        self.running: dict[int, RunningSequence] = {}
        self.recurrent = runner.recurrent.slot_bytes > 0
        self.keeps_states = self.recurrent and runner.limits.saved_states > 0
        self._slots: dict[tuple[int, QosClass | None], int] = {}
        self._pages: dict[int, int] = {}

    def runs(self, active: RunningSequence) -> bool:
        """Whether it still has its slot."""
        return self.running.get(active.slot) is active

    def pages_needed(self, sequence: Sequence) -> int:
        """Pages that what is known of a sequence takes, and one more for every running one, so
        that nobody comes in only to push somebody out at the next page."""
        return pages_for(sequence.known) + len(self.running)

    def fits(self, sequence: Sequence, removal: Iterable[RunningSequence]) -> bool:
        """Whether there are pages for a sequence, within its tenant's quota, once ``removal`` are
        removed."""
        tenant = sequence.request.tenant
        left = [(p.sequence.request.tenant, p.pages) for p in removal]
        if self.pages_needed(sequence) - len(left) > self.memory.available(tenant, left):
            return False
        # Of pages they share with it, the tenant pays for those nobody else holds then.
        inherited = self.memory.held(tenant, left) - self.memory.held(tenant)
        return self._tenants.within_quota(tenant, sequence.pages_to_begin + max(0, inherited))

    def place(self, sequence: Sequence) -> RunningSequence | None:
        """Give a sequence a slot, what is cached of it, and pages for what is known of it.

        None where there is no slot or too few pages; nothing is changed then.
        """
        if not self.free_slots:
            return None
        tenant, memory = sequence.request.tenant, self.memory
        tokens = sequence.tokens[: sequence.known]
        slot = self.free_slots[0]
        most = sequence.cacheable
        if not memory.fits(sequence.scope, tokens, most, self.pages_needed(sequence), tenant):
            return None
        hit = memory.adopt(sequence.scope, tokens, most, tenant, slot)
        pages = memory.take(pages_for(sequence.known) - len(hit.pages), tenant, slot)
        assert pages is not None, "it fits"
        self.free_slots.popleft()
        active = RunningSequence(sequence, slot, [*hit.pages, *pages])
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
            sequence.scope, sequence.tokens[:known], active.pages, active.published
        )

    def keep_state(self, active: RunningSequence) -> None:
        """Save the recurrent state where the slot stands, at the end of a page, in the queue."""
        if not self.keeps_states:
            return
        place = self._place_for_state(active)
        if place is not None:
            self._runner.recurrent.save(active.slot, place)
            tokens = self.table.computed[active.slot]
            active.states.append((tokens, place))
            if tokens < len(active.sequence.request.prompt):
                # Of a prompt: whoever asks with the same one goes on there, whatever is answered.
                self.publish(active)
                self._attach_state(active)
        self._next_cut(active)

    def remove(self, active: RunningSequence) -> None:
        """Take the slot and the pages from a sequence; what it computed stays in the cache."""
        sequence, slot = active.sequence, active.slot
        self.publish(active)
        self._attach_state(active)
        if active.undo is not None:
            self.memory.drop_state_slot(active.undo)
        del self.running[slot]
        sequence.active = None
        self.free_slots.append(slot)
        self._note_slots(sequence.request, -1)
        self.memory.release(active.pages, sequence.request.tenant)
        # A page that others hold is paid for by one of them now.
        for tenant in list(self._pages):
            self._note_pages(tenant)

    def reset(self) -> list[Sequence]:
        """Take everything from everybody after a fault, whatever was being done: who ran."""
        sequences = [active.sequence for active in self.running.values()]
        for sequence in sequences:
            sequence.active = None
        self.running.clear()
        self.free_slots = deque(range(len(self.table.computed)))
        self.memory.clear()
        for (tenant, qos), slots in self._slots.items():
            self._tenants.occupy(tenant, slots=-slots, qos=qos)
        for tenant, pages in self._pages.items():
            self._tenants.occupy(tenant, pages=-pages)
        self._slots.clear()
        self._pages.clear()
        return sequences

    # The account first: an interrupt on the way there leaves both as they were.

    def _note_slots(self, request: Request, slots: int) -> None:
        self._tenants.occupy(request.tenant, slots=slots, qos=request.qos)
        held = self._slots.get((request.tenant, request.qos), 0) + slots
        self._slots[request.tenant, request.qos] = held
        if not held:
            del self._slots[request.tenant, request.qos]

    def _note_pages(self, tenant: int) -> None:
        """Let the tenant's account say what is charged to it."""
        pages = self.memory.held(tenant)
        self._tenants.occupy(tenant, pages=pages - self._pages.get(tenant, 0))
        self._pages[tenant] = pages
        if not pages:
            del self._pages[tenant]

    def _occupy(self, active: RunningSequence, computed: int) -> None:
        sequence = active.sequence
        self.table.occupy(
            active.slot,
            computed=computed,
            known=sequence.known,
            # The last token of a sequence is sampled, not computed.
            end=max(sequence.known, sequence.last),
            sampling=sequence.request.sampling,
            every_row=sequence.on_logits is not None,
            hidden=sequence.output == HIDDEN,
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
        """While the prompt is read a state is kept once, at its last full page; then at every."""
        slot = active.slot
        computed, known = self.table.computed[slot], self.table.known[slot]
        end_of_prompt = (known - 1) // PAGE_TOKENS * PAGE_TOKENS
        following = (computed // PAGE_TOKENS + 1) * PAGE_TOKENS
        self.table.cut[slot] = end_of_prompt if computed < end_of_prompt else following

    def _place_for_state(self, active: RunningSequence) -> int | None:
        """A place for the next state of a sequence: beside one, since steps ahead may have computed
        tokens that the sequence never gets, or that of the older of two, since they compute less
        than a page."""
        if len(active.states) < 2:
            return self.memory.save_state_slot()
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
