"""Many requests of many tenants on one model: submit, cancel, step, events.

The assignment of requests to steps, chunks, slots and pages, waiting, preemption and prefix hits
change no bit of any answer. A step is planned from positions alone, which are known ahead; the
tokens stay on the device. So the host sees the end of a sequence some steps late, and drops what
later steps computed for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from contract.errors import QueueFull, RequestError, StepAbandoned, TenantQueueFull, ZincError
from contract.types import Clock, FinishReason, Request, Tenant, TokenEvent
from reference.engine.cancel_calls import CancelCalls
from reference.engine.checks import check_outputs, check_request, check_sizes, max_positions_of
from reference.engine.constraining import masks_with_min_tokens
from reference.engine.disk_step import disk_pages_of, flush_disk_cache, update_disk_cache
from reference.engine.drafter import Drafter, SpeculationStatistics
from reference.engine.memory_calls import MemoryCalls
from reference.engine.options import ENGINE_DEFAULTS, EngineOptions
from reference.engine.output_processor import OutputProcessor
from reference.engine.pipeline import Pipeline
from reference.engine.scheduler import Scheduler
from reference.engine.sequence import LogitsSink, MaskProvider, Sequence, new_sequence
from reference.engine.slot_manager import SlotManager, memory_of
from reference.engine.speculative_decoder import SpeculativeDecoder
from reference.engine.statistics import EngineStatistics
from reference.engine.tenant_calls import TenantCalls
from reference.engine.tenant_changes import TenantChanges
from reference.expert_outputs import ExpertSink
from reference.memory.prefix import scope_of
from reference.observer import NO_OBSERVER, Observer
from reference.runner import LOGITS, ModelRunner
from reference.sched.cost import StepCost
from reference.sched.scores import ScoreSink
from reference.sched.tenants import Tenants
from reference.sched.wait_queue import may_wait
from reference.usage import UsageCounters

if TYPE_CHECKING:
    from reference.memory.disk.cache import DiskCache

FAULTS = 2
"""The number of failed steps after which a request that ran in them ends with an error."""


def no_clock() -> float:
    """The clock of an engine that measures nothing: always 0 seconds. Only for tenants without rate
    limits, since the window of a rate never ends."""
    return 0.0


class Engine(CancelCalls, TenantCalls, MemoryCalls):
    """Runs requests on one runner, at most ``limits.slots`` at a time.

    Engines with the same ``tenants`` share their quotas. ``clock`` gives the time in seconds of
    every decision and measurement. ``drafter`` proposes tokens for speculative decoding, None for
    none. ``observer`` is called with every decision and every step. ``disk`` is a cache of KV pages
    that outlives the process. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        runner: ModelRunner,
        options: EngineOptions = ENGINE_DEFAULTS,
        *,
        tenants: Tenants | None = None,
        clock: Clock = no_clock,
        drafter: Drafter | None = None,
        observer: Observer = NO_OBSERVER,
        disk: DiskCache | None = None,
    ) -> None:
        check_sizes(runner.limits)
        self.runner, self.options = runner, options
        self.tenants = Tenants(clock=clock) if tenants is None else tenants
        self.usage, self.disk = UsageCounters(), disk
        self._disk = disk_pages_of(disk, runner, self.tenants)
        self.memory = memory_of(runner, options, self._disk)
        self._clock, self._observer = clock, observer
        self._arrivals, self._blocked, self._consistent = 0, False, True
        self._live: dict[int, Sequence] = {}
        self._stalled: dict[int, Sequence] = {}
        self._failed: list[Sequence] = []
        self._slot_manager = SlotManager(
            runner, self.memory, self.tenants, self._slot_lost, self._disk
        )
        cost = StepCost()
        self._speculative = (
            None
            if drafter is None
            else SpeculativeDecoder(runner, self._slot_manager, drafter, options, cost, clock)
        )
        self._scheduler = Scheduler(
            runner.limits, options, self._slot_manager, self.tenants, clock, observer, self.usage,
            cost, self._speculative,
        )  # fmt: skip
        self._pipeline = Pipeline(
            runner, options, self._scheduler, self.tenants, clock, observer, cost, self._speculative
        )
        self._output_processor = OutputProcessor(
            self._slot_manager, self._pipeline, self._speculative, self.tenants, self.usage,
            options.end_of_generation, self._end,
        )  # fmt: skip
        self._changes = TenantChanges(
            self.tenants, self._scheduler, self._output_processor, self.usage, self._live.values
        )

    @property
    def chunk_tokens(self) -> int:
        """The most prefill tokens of a step."""
        return self._scheduler.chunk_tokens

    @property
    def chunk_while_decoding(self) -> int:
        """The most prefill tokens of a step in which a sequence decodes."""
        return self._scheduler.chunk_while_decoding

    @property
    def steps_ahead(self) -> int:
        """Steps submitted before the oldest one is read."""
        return self._pipeline.steps_ahead

    @property
    def unread(self) -> tuple[int, ...]:
        """The tokens of each step that was begun and is not read. Any thread may ask."""
        return self._pipeline.unread_tokens

    @property
    def idle(self) -> bool:
        """True if no request waits or runs, and all events were taken."""
        return not self._live and not self._output_processor.pending

    @property
    def has_events(self) -> bool:
        """Whether there are events that were not taken."""
        return self._output_processor.pending

    @property
    def blocked(self) -> bool:
        """Whether the latest ``advance`` found nothing to compute or read: every request waits for
        a quota or for its consumer."""
        return self._blocked

    @property
    def active_weight(self) -> float:
        """The sum of the weights of the tenants that have requests in this engine."""
        tenants = {sequence.request.tenant for sequence in self._live.values()}
        return sum(self.tenants[tenant].weight for tenant in tenants)

    @property
    def statistics(self) -> EngineStatistics:
        """The engine's counts at this moment."""
        memory, counts, speculative = self.memory, self._scheduler.counts, self._speculative
        return EngineStatistics(
            slots=self.runner.limits.slots,
            running=len(self._slot_manager.running),
            waiting=len(self._scheduler.waiting),
            pages=memory.total,
            free_pages=memory.free,
            cached_pages=memory.cached,
            steps=self._pipeline.steps,
            admitted=counts.admitted,
            preempted=counts.preempted,
            prefix=memory.statistics,
            speculation=(
                SpeculationStatistics() if speculative is None else speculative.statistics
            ),
            disk=None if self.disk is None else self.disk.statistics,
        )

    def submit(
        self,
        request: Request,
        on_logits: LogitsSink | None = None,
        logits_from: int = 0,
        allowed: MaskProvider | None = None,
        output: str = LOGITS,
        on_scores: ScoreSink | None = None,
        on_experts: ExpertSink | None = None,
    ) -> None:
        """Queue a request. Raises RequestError if it can never run in this engine, or if a request
        with its id waits or runs; QueueFull if the queue is full; TenantQueueFull if only its
        tenant has too many requests.

        - ``on_logits`` receives the logits of every position from ``logits_from`` on, chunk by
          chunk. With ``output`` HIDDEN it receives hidden states instead, which need
          ``limits.hidden_states``; with ROW_DIGEST the bits of digests, which need
          ``limits.digests``.
        - ``on_scores`` receives the scores that ``request.score_from`` asks for.
        - ``on_experts`` receives the experts used at every position; it needs ``limits.experts``.
        - ``allowed`` is called before every token and gives the mask of the allowed tokens. If no
          token is allowed or the call fails, the request ends with an error."""
        tenant = self.tenants[request.tenant]
        if self.tenants.is_removed(tenant.id):
            raise RequestError("tenant", f"{tenant.id} was removed")
        self.finish_removals()
        try:
            pages = self.memory.reservations.max_for(tenant.id)
            allowed = masks_with_min_tokens(request, allowed, self.options, self.runner)
            check_request(request, tenant, self.runner, pages, masked=allowed is not None)
            check_outputs(self.runner, output, experts=on_experts is not None)
            if request.id in self._live:
                raise RequestError("id", f"is {request.id}, that of a request still under way")
            self._check_queue(tenant)
        except ZincError:
            self.usage.rejected(tenant.id)
            raise
        sequence = new_sequence(
            request,
            order=self._arrivals,
            scope=(*scope_of(tenant), *self.runner.model.adapters.identity(request.adapters)),
            max_positions=max_positions_of(request, tenant, self.runner.limits),
            arrived=self._clock(),
            on_logits=on_logits,
            logits_from=logits_from,
            output=output,
            allowed=allowed,
            on_scores=on_scores,
            on_experts=on_experts,
        )
        with self._change():
            self._arrivals += 1
            self.tenants.occupy(request.tenant, live=1, holder=self._slot_manager)
            entry, tokens = self.usage.entry(tenant.id), len(request.prompt)
            # One line, so that an interrupt comes before or after both assignments.
            entry.prompted, self._live[request.id] = entry.prompted + tokens, sequence
            self._scheduler.enqueue(sequence)
            self._observer.submitted(self._clock(), request)

    def _check_queue(self, tenant: Tenant) -> None:
        """Raise QueueFull if no more requests of a tenant may wait."""
        count, many = len(self._scheduler.waiting), len(self.tenants)
        # If this tenant had all that wait and might have one more, its own need no counting.
        few = count < tenant.max_waiting and may_wait(count, count, self.options.queue_depth, many)
        own = 0 if few else sum([s.tenant == tenant.id for s in self._scheduler.waiting.values()])
        within = own < tenant.max_waiting
        if within and may_wait(own, count, self.options.queue_depth, many):
            return
        seconds = self._scheduler.queue.retry_after()
        if within and count >= self.options.queue_depth:
            raise QueueFull(self.options.queue_depth, seconds)
        rate = self.tenants.rates_free_in(tenant.id)
        raise TenantQueueFull(own, max(seconds, rate), rate > 0)

    def stall(self, request_id: int, *, patient: bool = False) -> None:
        """Stop computing for a request, except in steps in flight, until ``unstall``: its consumer
        takes no tokens. The request ends after ``stall_steps`` steps, unless every caller that
        stalled it was ``patient``, that is, waits for work of the host and not for a client."""
        if (sequence := self._live.get(request_id)) is not None:
            sequence.patient = patient and (sequence.patient or not sequence.stalled)
            if not sequence.stalled:
                self._set_stalled(sequence, True)

    def unstall(self, request_id: int) -> None:
        """Continue computing for a request: its consumer takes tokens again."""
        sequence = self._live.get(request_id)
        if sequence is not None and sequence.stalled:
            self._set_stalled(sequence, False)

    def progress(self, request_id: int) -> int:
        """The number of submitted positions of a request; 0 if it does not run."""
        sequence = self._live.get(request_id)
        if sequence is None or not sequence.running:
            return 0
        return self._slot_manager.table.computed[sequence.slot]

    def run(self) -> Iterator[TokenEvent]:
        """Step until idle."""
        while not self.idle:
            yield from self.step()

    def step(self) -> list[TokenEvent]:
        """``advance``, then ``take_events``."""
        self.advance()
        return self.take_events()

    def advance(self) -> None:
        """Submit steps up to the limit of steps in flight, wait for the oldest one, and turn its
        tokens into events. Does nothing while there are events that were not taken.

        After any exception, including KeyboardInterrupt, all sequences that ran wait again with the
        tokens they have, and the next call continues. A request whose steps fail repeatedly ends
        with an error."""
        self._repair()
        try:
            self._consistent = False
            self._advance()
            self._consistent = True
        except BaseException as error:
            self._recover(fault=isinstance(error, Exception))
            raise

    def take_events(self) -> list[TokenEvent]:
        """Return the events of ``advance``. They are removed in one instruction, so an interrupt
        before it loses none: the next call returns them."""
        return self._output_processor.events()

    def abandon(self) -> None:
        """Drop all requests and untaken events, and remove their usage from the accounts of their
        tenants. For an engine that is not used any more while others share its tenants."""
        self._output_processor.drop()
        if self._disk is not None:
            flush_disk_cache(self._disk, self._pipeline)
        self._live.clear()
        self._consistent = False
        self._recover(fault=False)

    def _advance(self) -> None:
        self._end_overdue()
        self._blocked = False
        # Events are taken before a step can fail: a failed step would hide a finished answer.
        if not self._output_processor.pending:
            try:
                self._pipeline.fill()
                read = self._pipeline.read()
                self._blocked = read is None
                if read is not None and self._output_processor.take(*read, self._clock()):
                    self._pipeline.fill_idle()
            except StepAbandoned:
                self._end_abandoned()
        self._output_processor.count()
        self._changes.apply()
        if self._disk is not None:
            blocked = self._blocked
            self._blocked = update_disk_cache(self._disk, self._pipeline, not self._live, blocked)

    def _repair(self) -> None:
        """Recover if an earlier recovery was interrupted. Not for calls made within others."""
        if not self._consistent:
            self._recover(fault=False)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A change that is made completely, or undone by ``_recover`` after an error or interrupt:
        at once, or in the next ``advance`` if that is interrupted again."""
        outermost = self._consistent
        try:
            self._consistent = False
            yield
            self._consistent = outermost
        except BaseException as error:
            if outermost:
                self._recover(fault=isinstance(error, Exception))
            raise

    def _slot_lost(self, sequence: Sequence) -> None:
        """Called when a sequence loses its slot: plan the next step again, and let the drafter
        forget the sequence."""
        self._pipeline.replan()
        if self._speculative is not None:
            self._speculative.forget(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        request = sequence.request
        del self._live[request.id]
        self._stalled.pop(request.id, None)
        self._pipeline.cancels.discard(request.id)
        self.tenants.occupy(request.tenant, live=-1, holder=self._slot_manager)
        self._scheduler.finished(sequence, reason)

    def _end_overdue(self) -> None:
        """End requests whose consumers stalled too long, whose steps failed too often, or for which
        there can never be room."""
        lost = *self._failed, *self._scheduler.unfit
        if not lost and not self._stalled:
            return
        ending = [(sequence, FinishReason.ERROR) for sequence in lost]
        for sequence in self._stalled.values():
            sequence.stalled_steps += not sequence.patient
            if sequence.stalled_steps > self.options.stall_steps:
                ending.append((sequence, FinishReason.CLIENT_TOO_SLOW))
        self._failed, self._scheduler.unfit = [], []
        for sequence, reason in ending:
            if self._live.get(sequence.request.id) is sequence:
                self._output_processor.end_early(sequence, reason)

    def _set_stalled(self, sequence: Sequence, stalled: bool) -> None:
        with self._change():
            sequence.stalled_steps = 0
            self._scheduler.set_stalled(sequence, stalled)
            self._stalled = {s.request.id: s for s in self._live.values() if s.stalled}
            self._pipeline.replan()

    def _recover(self, *, fault: bool) -> None:
        """Let every sequence wait, and empty the cache, since the effect of the steps in flight is
        unknown. Everything is derived from the live sequences and the untaken events, so this may
        be interrupted and called again."""
        self._pipeline.clear()
        cancelled = [(s, FinishReason.CANCELLED) for s in self._live.values() if s.cancelled]
        for sequence, reason in (*self._output_processor.apply_batch(self._live), *cancelled):
            del self._live[sequence.request.id]
            self._observer.finished(self._clock(), sequence.request.id, None, reason)
        live = list(self._live.values())
        self._scheduler.rebuild(live, fault=fault)
        self._failed = [sequence for sequence in live if sequence.faults >= FAULTS]
        self._stalled = {s.request.id: s for s in live if s.stalled}
        self._changes.apply()
        self._consistent = True
