"""Steps under way: planned from positions, submitted ahead, read in order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from contract.types import Clock, QosClass
from reference.engine.constraining import with_masks
from reference.engine.options import EngineOptions
from reference.engine.scheduler import Scheduler
from reference.engine.sequence import RunningSequence
from reference.engine.speculative_decoder import SpeculativeDecoder
from reference.limits import RING_STEPS, mask_words
from reference.observer import Observer, StepObservation
from reference.runner import ModelRunner, StepOutput, Submission
from reference.sched.budget import prefill_tokens
from reference.sched.cost import Load, StepCost
from reference.sched.planner import Chunk, Pending, divided, left_of, plan_step
from reference.sched.slots import SteadyDecode
from reference.sched.tenants import Tenants

INTERVAL_RATIO = {QosClass.INTERACTIVE: 1.3, QosClass.STANDARD: 3.0}
"""How much longer than its decoding alone a step with prefill may take while a sequence of the
class decodes (see ``prefill_tokens``). Batch work sets no bound."""


class Step(NamedTuple):
    """A step under way: what of which placement it computes, and the rows of each.

    ``attended`` positions in all, ``began`` by the clock; ``waiting``, ``free_pages`` and
    ``cached_pages`` as they were then. ``computed`` has, with what counts them for their
    tenants, how many tokens are prefilled and how many decoded.
    """

    number: int
    submission: Submission
    actives: list[RunningSequence]
    requests: list[int]
    chunks: list[Chunk]
    rows: list[int]
    attended: int
    began: float
    waiting: int
    free_pages: int
    cached_pages: int
    computed: list[tuple[Callable[[int, int], None], list[int]]]


class Computed(NamedTuple):
    """What a step did for one placement: positions ``start`` to ``stop`` - 1, and rows of logits
    from ``first_row`` to ``end_row`` - 1 of the step's output."""

    active: RunningSequence
    start: int
    stop: int
    first_row: int
    end_row: int

    @property
    def drafted(self) -> bool:
        """Whether all tokens but the first were guesses."""
        return self.active.sequence.drafted(self.start, self.end_row - self.first_row)


class Pipeline:
    """Submits steps to a runner, ``steps_ahead`` of them ahead of the one that is read; nothing
    else submits any. ``chunk_tokens`` and ``chunk_while_decoding`` are those of the options, within
    the limits."""

    def __init__(
        self,
        runner: ModelRunner,
        options: EngineOptions,
        scheduler: Scheduler,
        tenants: Tenants,
        clock: Clock,
        observer: Observer,
        cost: StepCost,
        speculative: SpeculativeDecoder | None,
    ) -> None:
        steps_ahead = options.steps_ahead
        if steps_ahead is None:
            steps_ahead = 1 if runner.tier.info.asynchronous else 0
        if not 0 <= steps_ahead < RING_STEPS:
            raise ValueError(f"steps_ahead is {steps_ahead}, not 0 to {RING_STEPS - 1}")
        most = runner.limits.step_tokens - runner.limits.slots
        self.steps_ahead = steps_ahead
        self.chunk_tokens = min(options.chunk_tokens or most, most)
        self.chunk_while_decoding = min(options.chunk_while_decoding or most, self.chunk_tokens)
        self.steps = 0
        self._runner = runner
        self._scheduler = scheduler
        self._slot_manager = scheduler.slot_manager
        self._tenants = tenants
        self._clock = clock
        self._observer = observer
        self._cost = cost
        self._speculative = speculative
        self._mask_words = mask_words(runner.model.config.vocab)
        self._in_flight: deque[Step] = deque()
        self._latest: Step
        self._steady: SteadyDecode | None = None
        self._read_at = 0.0

    def changed(self) -> None:
        """Somebody came, left or stopped: the next step is planned anew."""
        self._steady = None

    def clear(self) -> None:
        """Forget the steps under way; the tier has its own copy of their inputs."""
        self._in_flight.clear()
        self._steady = None

    def fill(self) -> None:
        """Submit steps until as many are under way as may be, or there is nothing to compute."""
        self._drop_abandoned()
        while len(self._in_flight) <= self.steps_ahead and self._start():
            pass

    def read(self) -> tuple[StepOutput, Iterator[Computed]] | None:
        """Wait for the oldest step: its output, and what it did for whoever still has the place
        it was computed for. None where nothing is under way."""
        if not self._in_flight:
            return None
        step = self._in_flight[0]
        output = self._runner.collect(step.submission)
        self._in_flight.popleft()
        self._count(step)
        self._observe(step)
        return output, self._computed(step)

    def _drop_abandoned(self) -> None:
        while self._in_flight and not any(map(self._slot_manager.runs, self._in_flight[0].actives)):
            self._count(self._in_flight.popleft())

    def _start(self) -> bool:
        """Submit the next step; False when there is nothing to compute."""
        steady = self._steady
        if steady is None or not steady.left or self._scheduler.admit():
            return self._start_planned()
        if not self._scheduler.grow(steady.at_page_begin()):
            return self._start_planned()
        before = self._latest
        self._follow(
            self._runner.submit(steady.next()),
            before.actives,
            before.requests,
            steady.chunks,
            before.rows,
            before.attended + len(steady.chunks),
        )
        return True

    def _start_planned(self) -> bool:
        self._steady = None
        chunks = self._planned()
        if not chunks and self._scheduler.due:
            # A sequence that needed a page left, and there is room for another now.
            chunks = self._planned()
        if not chunks:
            return False
        slot_manager = self._slot_manager
        table = slot_manager.table
        rows = table.rows_of(chunks)
        actives = [slot_manager.running[slot] for slot, _, _ in chunks]
        tokens = [active.sequence.tokens for active in actives]
        inputs = table.step_input(chunks, rows, tokens)
        inputs = with_masks(inputs, actives, chunks, rows, self._mask_words)
        if self._speculative is not None:
            self._speculative.before_step(actives)
        submission = self._runner.submit(inputs)
        for slot, start, count in chunks:
            table.computed[slot] = start + count
        attended = sum([count * (2 * start + count + 1) for _, start, count in chunks]) // 2
        requests = [active.sequence.request.id for active in actives]
        self._follow(submission, actives, requests, chunks, rows, attended)
        self._publish(chunks, actives)
        self._steady = SteadyDecode.after(table, chunks, rows, inputs)
        return True

    def _planned(self) -> list[Chunk]:
        """The chunks of the next step, once their sequences have the pages they need."""
        self._scheduler.admit()
        if self._speculative is not None:
            self._speculative.draft()
        chunks = self._plan()
        while chunks and not self._scheduler.grow(chunks):
            chunks = self._plan()
        return chunks

    def _plan(self) -> list[Chunk]:
        slot_manager = self._slot_manager
        pending = slot_manager.table.pending(slot_manager.running)
        chunks = plan_step(pending, self._prefill_tokens(pending))
        if slot_manager.keeps_states:
            chunks = slot_manager.table.at_page_ends(chunks)
        return slot_manager.table.within_rows(chunks, self._runner.limits.step_rows)

    def _prefill_tokens(self, pending: Sequence[Pending]) -> int:
        """The prefill tokens of a step that keep the decode interval of its most urgent class."""
        decoding, reading = divided(pending)
        if not decoding or not reading:
            return self.chunk_tokens
        most = self._runner.limits.step_tokens - left_of(decoding)
        running = self._slot_manager.running
        requests = [running[one.slot].sequence.request for one in decoding]
        asked = {(request.tenant, request.qos) for request in requests}
        ratios = (
            INTERVAL_RATIO.get(self._tenants[tenant].qos.lowered_to(qos)) for tenant, qos in asked
        )
        ratio = min((ratio for ratio in ratios if ratio is not None), default=None)
        return prefill_tokens(pending, self._cost, ratio, min(self.chunk_while_decoding, most))

    def _follow(
        self,
        submission: Submission,
        actives: list[RunningSequence],
        requests: list[int],
        chunks: list[Chunk],
        rows: list[int],
        attended: int,
    ) -> None:
        memory = self._slot_manager.memory
        self._latest = Step(
            self.steps,
            submission,
            actives,
            requests,
            chunks,
            rows,
            attended,
            self._clock(),
            len(self._scheduler.waiting),
            memory.free,
            memory.cached,
            self._computed_for(actives, chunks, rows),
        )
        self.steps += 1
        self._in_flight.append(self._latest)

    def _count(self, step: Step) -> None:
        """Count what a step computed towards the rates of its tenants, whatever became of those it
        was computed for."""
        for count, (prefilled, decoded) in step.computed:
            count(prefilled, decoded)

    def _computed_for(
        self, actives: Sequence[RunningSequence], chunks: Sequence[Chunk], rows: Sequence[int]
    ) -> list[tuple[Callable[[int, int], None], list[int]]]:
        """By tenant how many tokens a step prefills, and how many it decodes, guesses aside."""
        counts: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        for active, (_, start, tokens), requested in zip(actives, chunks, rows, strict=True):
            sequence = active.sequence
            of_tenant = counts[sequence.request.tenant]
            sampled = requested > 0 and sequence.samples and start + tokens >= sequence.known
            guessed = sequence.drafted(start, requested)
            of_tenant[0] += 0 if guessed else tokens - sampled
            of_tenant[1] += sampled
        return [(self._tenants.counter(tenant), count) for tenant, count in counts.items()]

    def _publish(self, chunks: list[Chunk], actives: list[RunningSequence]) -> None:
        """Make whole pages of prompts findable, and keep recurrent states where it is time to."""
        table = self._slot_manager.table
        for (slot, start, count), active in zip(chunks, actives, strict=True):
            if not self._slot_manager.runs(active):
                # Whoever was asked for its mask has cancelled it.
                continue
            if start < table.known[slot]:
                self._slot_manager.publish(active)
            if start + count == table.cut[slot]:
                self._slot_manager.keep_state(active)

    def _observe(self, step: Step) -> None:
        now = self._clock()
        seconds = now - max(step.began, self._read_at)
        self._read_at = now
        tokens = sum([count for _, _, count in step.chunks])
        self._cost.observe(Load(tokens, step.attended), seconds)
        self._observer.step(
            StepObservation(
                number=step.number,
                began=step.began,
                ended=now,
                chunks=step.chunks,
                requests=step.requests,
                waiting=step.waiting,
                free_pages=step.free_pages,
                cached_pages=step.cached_pages,
            )
        )

    def _computed(self, step: Step) -> Iterator[Computed]:
        running, end = self._slot_manager.running, 0
        for active, (slot, start, count), rows in zip(
            step.actives, step.chunks, step.rows, strict=True
        ):
            first, end = end, end + rows
            # A sequence that ended, was cancelled or preempted may be in steps under way.
            if running.get(slot) is active:
                yield Computed(active, start, start + count, first, end)
