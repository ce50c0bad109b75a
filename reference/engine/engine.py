"""Many requests of many tenants on one model: submit, cancel, step, events.

Which requests share a step, in which chunks, slots and pages, who waits, who is preempted and what
comes from the prefix cache changes no bit of any of them. A step is planned from positions alone,
which are known ahead; the tokens stay on the device. So the end of a sequence is seen some steps
late, and what was computed for it beyond is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from contract.errors import QueueFull, RequestError
from contract.types import Clock, FinishReason, Request, Tenant, TokenEvent
from reference.engine.constraining import NOT_LISTED, Listed, listed_of
from reference.engine.pipeline import Computed, Pipeline
from reference.engine.placing import Placing
from reference.engine.residents import Residents
from reference.engine.sequence import LogitsSink, MaskProvider, Placement, Sequence, scope_of
from reference.engine.speculating import Speculating
from reference.engine.speculation import Drafter, SpeculationStatistics
from reference.limits import pages_for
from reference.memory.kv import KvMemory
from reference.memory.prefix import PrefixStatistics
from reference.observer import NOBODY, Observer
from reference.runner import ModelRunner, StepOutput
from reference.sched.admission import WaitQueue
from reference.sched.constraints import check_constraints
from reference.sched.cost import StepCost
from reference.sched.tenants import Tenants

FAULTS = 2
"""Steps that may fail under a request before it ends with an error."""


RETRY_SECONDS = 1.0
"""When to come again where too many wait: soon, since whoever comes again waits outside."""


def no_clock() -> float:
    """The clock of an engine that measures nothing: rates and ages stay zero."""
    return 0.0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Where an engine stands: requests and pages now, steps and preemptions since it began."""

    slots: int
    running: int
    waiting: int
    pages: int
    free_pages: int
    cached_pages: int
    steps: int
    admitted: int
    preempted: int
    prefix: PrefixStatistics
    speculation: SpeculationStatistics


class Engine:
    """Runs any number of requests on one runner, ``limits.slots`` of them at a time.

    ``chunk_tokens`` caps the prefill tokens of a step; ``end_of_generation`` are the token ids
    that finish a sequence; ``page_order`` is the order the pool hands out its pages in.
    ``steps_ahead``: steps submitted before the oldest one is read, at most RING_STEPS - 1; None is
    one where the tier works while the host plans, else none. ``queue_depth`` requests may wait.
    With ``copy_pages`` a prefix that ends within a cached page is not computed again, and
    ``host_pages`` evicted pages are kept in host memory.
    A request whose consumer stalls for ``stall_steps`` steps ends. Where ``drafter`` is right about
    at most ``draft_tokens`` tokens, a step yields several. Times are those of ``clock``.
    Not thread-safe: one thread calls it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        end_of_generation: frozenset[int] = frozenset(),
        chunk_tokens: int | None = None,
        page_order: Iterable[int] | None = None,
        steps_ahead: int | None = None,
        tenants: Tenants | None = None,
        clock: Clock = no_clock,
        queue_depth: int = 1024,
        prefix_cache: bool = True,
        copy_pages: bool = False,
        host_pages: int = 0,
        stall_steps: int = 64,
        drafter: Drafter | None = None,
        draft_tokens: int = 11,
        observer: Observer = NOBODY,
    ) -> None:
        limits = runner.limits
        if limits.step_tokens <= limits.slots or limits.step_rows < limits.slots:
            raise ValueError("a step must hold a decode token of every slot and one of prefill")
        if 0 < limits.masks < limits.slots:
            raise ValueError("a step must hold a mask for every slot, or none")
        if steps_ahead is None:
            steps_ahead = 1 if runner.tier.info.asynchronous else 0
        self.runner = runner
        self.end_of_generation = end_of_generation
        self.tenants = Tenants(clock=clock) if tenants is None else tenants
        self.memory = KvMemory(
            limits.pages,
            order=page_order,
            states=limits.saved_states if runner.recurrent.slot_bytes else None,
            cache=prefix_cache,
            copies=runner.page_copies() if host_pages or copy_pages else None,
            host_pages=host_pages,
        )
        for tenant in self.tenants:
            self.memory.reserve(tenant.id, tenant.reserved_pages)
        self._clock = clock
        self._observer = observer
        self._queue_depth = queue_depth
        self._stall_steps = stall_steps
        self._residents = Residents(runner, self.memory, self.tenants)
        queue = WaitQueue(self.tenants, clock=clock)
        self._placing = Placing(self._residents, self.tenants, queue, clock, observer)
        cost = StepCost()
        self._speculating = None
        if drafter is not None:
            self._speculating = Speculating(runner, self._residents, drafter, draft_tokens, cost)
        most = limits.step_tokens - limits.slots
        self._pipeline = Pipeline(
            runner,
            self._placing,
            self.tenants,
            chunk_tokens=min(chunk_tokens or most, most),
            steps_ahead=steps_ahead,
            clock=clock,
            observer=observer,
            cost=cost,
            speculating=self._speculating,
        )
        self._live: dict[int, Sequence] = {}
        self._arrivals = 0
        self._stalled: dict[int, Sequence] = {}
        self._failed: list[Sequence] = []
        self._events: list[TokenEvent] = []

    @property
    def chunk_tokens(self) -> int:
        """The most prefill tokens of a step."""
        return self._pipeline.chunk_tokens

    @property
    def steps_ahead(self) -> int:
        """Steps submitted before the oldest one is read."""
        return self._pipeline.steps_ahead

    @property
    def idle(self) -> bool:
        """True when nothing is waiting or running."""
        return not self._live

    @property
    def active_weight(self) -> float:
        """The weights of the tenants that have requests here, summed."""
        tenants = {sequence.request.tenant for sequence in self._live.values()}
        return sum(self.tenants[tenant].weight for tenant in tenants)

    @property
    def statistics(self) -> EngineStatistics:
        """Where the engine stands."""
        memory, counts, speculating = self.memory, self._placing.counts, self._speculating
        return EngineStatistics(
            slots=self.runner.limits.slots,
            running=len(self._residents.running),
            waiting=len(self._placing.waiting),
            pages=memory.total,
            free_pages=memory.free,
            cached_pages=memory.cached,
            steps=self._pipeline.steps,
            admitted=counts.admitted,
            preempted=counts.preempted,
            prefix=memory.statistics,
            speculation=(
                SpeculationStatistics() if speculating is None else speculating.statistics
            ),
        )

    def put_tenant(self, tenant: Tenant) -> None:
        """Add a tenant or change one, in force from the next decision on.

        Raises ConfigError when it is not valid, and ValueError when more pages are reserved than
        there are.
        """
        self.tenants.put(tenant)
        self.memory.reserve(tenant.id, tenant.reserved_pages)

    def submit(
        self,
        request: Request,
        on_logits: LogitsSink | None = None,
        allowed: MaskProvider | None = None,
    ) -> None:
        """Queue a request. Raises RequestError when it can never run here, or when a request with
        its id waits or runs, and QueueFull when too many wait.

        With ``on_logits`` the logits of every position of the sequence are computed and handed
        over chunk by chunk. ``allowed`` is asked before every token which ones it may be; where
        that is none, or it fails, the request ends with an error.
        """
        self._check(request, masked=allowed is not None)
        if len(self._placing.waiting) >= self._queue_depth:
            raise QueueFull(self._queue_depth, RETRY_SECONDS)
        reach = self._reach(request)
        tokens = np.empty(reach, np.int32)
        tokens[: len(request.prompt)] = request.prompt
        sequence = Sequence(
            request=request,
            order=self._arrivals,
            since=0.0,
            scope=scope_of(self.tenants[request.tenant]),
            tokens=tokens,
            known=len(request.prompt),
            last=reach - 1,
            on_logits=on_logits,
            allowed=allowed,
        )
        self._arrivals += 1
        self._live[request.id] = sequence
        self.tenants.occupy(request.tenant, live=1)
        self._placing.enqueue(sequence)
        self._observer.submitted(self._clock(), request)

    def cancel(self, request_id: int) -> None:
        """Forget a request and free its slot and pages; no event of it follows. An unknown id is
        already finished."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.CANCELLED)

    def stall(self, request_id: int) -> None:
        """The consumer takes no more tokens for now: nothing is computed for the request, beyond
        the steps under way, until ``unstall``. After ``stall_steps`` steps it ends."""
        sequence = self._live.get(request_id)
        if sequence is not None and not sequence.stalled:
            self._set_stalled(sequence, True)
            self._stalled[request_id] = sequence

    def unstall(self, request_id: int) -> None:
        """The consumer takes tokens again."""
        sequence = self._stalled.pop(request_id, None)
        if sequence is not None:
            self._set_stalled(sequence, False)

    def progress(self, request_id: int) -> int:
        """How many tokens of a request are computed or submitted; 0 for one that waits or ended."""
        sequence = self._live.get(request_id)
        if sequence is None or sequence.placement is None:
            return 0
        return int(self._residents.table.computed[sequence.placement.slot])

    def run(self) -> Iterator[TokenEvent]:
        """Step until idle."""
        while not self.idle:
            yield from self.step()

    def step(self) -> list[TokenEvent]:
        """Submit what may be under way, wait for the oldest step, return the tokens it produced.

        After an exception, a KeyboardInterrupt among them, what ran waits again with the tokens it
        has and goes on in the next call; an error that comes back ends the requests it hits.
        """
        try:
            self._end_overdue()
            self._pipeline.fill()
            read = self._pipeline.read()
            if read is not None:
                output, computed = read
                tokens = output.token.tolist()
                for part in computed:
                    self._take(part, tokens, output)
        except BaseException as error:
            self._recover(isinstance(error, Exception))
            raise
        events, self._events = self._events, []
        return events

    def _take(self, part: Computed, tokens: list[int], output: StepOutput) -> None:
        """What one sequence got out of a step."""
        sequence, stop = part.placement.sequence, part.stop
        request = sequence.request
        if sequence.on_logits is not None:
            skipped = max(0, sequence.scored - part.start)
            if skipped < stop - part.start:
                rows = output.logits[part.first_row + skipped : part.end_row].copy()
                sequence.on_logits(part.start + skipped, rows)
                sequence.scored = stop
        if stop < sequence.known:
            self.tenants.count(request.tenant, stop - part.start, 0)
            return
        first = part.start + 1 if self._drafted(part) else stop
        given = 0
        for position in range(first, stop + 1):
            row = part.end_row - 1 - (stop - position)
            token = tokens[row] if row >= part.first_row else -1
            guess = int(sequence.tokens[position]) if position < stop else token
            given += token >= 0
            listed = listed_of(request, output, row) if token >= 0 else NOT_LISTED
            self._receive(part.placement, position, token, listed)
            if token != guess or sequence.placement is None:
                break
        self.tenants.count(request.tenant, stop - part.start - 1 if first == stop else 0, given)
        self._after_tokens(part)

    def _drafted(self, part: Computed) -> bool:
        return bool(self._residents.table.draft[part.placement.slot])

    def _receive(self, placement: Placement, position: int, token: int, listed: Listed) -> None:
        """What ``token``, sampled for ``position``, means: the next one, or the end."""
        sequence = placement.sequence
        request = sequence.request
        reason = None
        if not sequence.samples:
            token, reason, listed = -1, FinishReason.LENGTH, NOT_LISTED
        elif token < 0:
            reason = FinishReason.ERROR
        elif token in self.end_of_generation and not request.ignore_end:
            reason = FinishReason.STOP
        elif position >= sequence.last:
            reason = FinishReason.LENGTH
        self._events.append(TokenEvent(request.id, token, position, reason, *listed))
        if reason is None:
            sequence.tokens[position] = token
            sequence.known = position + 1
        else:
            self._end(sequence, reason)

    def _after_tokens(self, part: Computed) -> None:
        """Let a sequence that goes on be planned from the tokens it has."""
        placement, table = part.placement, self._residents.table
        if placement.sequence.placement is not placement:
            return
        if self._drafted(part):
            assert self._speculating is not None
            self._speculating.settle(placement, part.start, part.stop)
            self._pipeline.changed()
        elif table.lockstep[placement.slot]:
            table.known[placement.slot] = placement.sequence.known
            self._pipeline.changed()
        if self._speculating is not None and self._speculating.consider(placement):
            self._pipeline.changed()

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.request
        del self._live[request.id]
        self._stalled.pop(request.id, None)
        self.tenants.occupy(request.tenant, live=-1)
        self._pipeline.changed()
        if self._speculating is not None and sequence.placement is not None:
            self._speculating.forget(sequence.placement)
        self._placing.finished(sequence, reason)

    def _end_overdue(self) -> None:
        """End the requests whose consumers stalled too long, or that steps failed under."""
        ending = [(sequence, FinishReason.ERROR) for sequence in self._failed]
        for sequence in self._stalled.values():
            sequence.stalled_steps += 1
            if sequence.stalled_steps > self._stall_steps:
                ending.append((sequence, FinishReason.CLIENT_TOO_SLOW))
        self._failed = []
        for sequence, reason in ending:
            if self._live.get(sequence.request.id) is sequence:
                event = TokenEvent(sequence.request.id, -1, sequence.known, reason)
                self._events.append(event)
                self._end(sequence, reason)

    def _set_stalled(self, sequence: Sequence, stalled: bool) -> None:
        sequence.stalled, sequence.stalled_steps = stalled, 0
        if sequence.placement is not None:
            self._residents.table.stalled[sequence.placement.slot] = stalled
        self._pipeline.changed()

    def _recover(self, fault: bool) -> None:
        """Nobody is placed and nothing cached any more: what the steps under way did is unknown."""
        self._pipeline.clear()
        for sequence in self._placing.recover():
            if sequence.request.id not in self._live:
                continue
            sequence.faults += fault
            self._placing.enqueue(sequence)
            if sequence.faults >= FAULTS:
                self._failed.append(sequence)

    def _check(self, request: Request, *, masked: bool) -> None:
        limits, vocab = self.runner.limits, self.runner.model.config.vocab
        request.sampling.validate()
        tenant = self.tenants[request.tenant]
        if request.id in self._live:
            raise RequestError("id", f"is {request.id}, that of a request still under way")
        if not request.prompt:
            raise RequestError("prompt", "is empty; give at least one token")
        if any(not 0 <= token < vocab for token in request.prompt):
            raise RequestError("prompt", f"holds a token id outside 0 to {vocab - 1}")
        most = min(limits.context, tenant.max_context)
        if len(request.prompt) > most:
            raise RequestError(
                "prompt",
                f"is {len(request.prompt)} tokens, the context is {most}; "
                "shorten it or raise --context",
            )
        if request.sampling.penalizes and request.sampling.repeat_last_n > limits.recent_tokens:
            raise RequestError("repeat_last_n", f"is at most {limits.recent_tokens}")
        check_constraints(request, limits, vocab, masked=masked)
        self._check_pages(request)

    def _check_pages(self, request: Request) -> None:
        """A request alone must be able to finish in the pages its tenant may have."""
        tenant = self.tenants[request.tenant]
        others = sum(other.reserved_pages for other in self.tenants if other.id != tenant.id)
        most = min(tenant.max_kv_pages, self.memory.total - others)
        needed = pages_for(self._reach(request))
        if needed > most:
            raise RequestError(
                "max_tokens", f"with the prompt needs {needed} KV pages, there are {most}"
            )

    def _reach(self, request: Request) -> int:
        most = min(self.runner.limits.context, self.tenants[request.tenant].max_context)
        return min(len(request.prompt) + request.max_tokens, most)
