"""The steps in flight: built from positions, submitted ahead, read in order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from contract.cancel_token import CancelToken
from contract.tier import AbandonsSteps
from contract.types import Clock
from reference.engine.constraining import with_masks
from reference.engine.options import EngineOptions
from reference.engine.scheduler import Scheduler
from reference.engine.sequence import Sequence
from reference.engine.speculative_decoder import SpeculativeDecoder
from reference.engine.step_cancels import Awaited, StepCancels
from reference.engine.steps import Abandoned, Computed, Counted, Starting, Step
from reference.limits import RING_STEPS, mask_words
from reference.observer import Observer, StepObservation
from reference.runner import ModelRunner, StepInput, StepOutput, Submission
from reference.sched.cost import Load, StepCost
from reference.sched.planner import Chunk
from reference.sched.slots import SteadyDecode, SteadyRound
from reference.sched.tenants import Tenants

UNCANCELLED = nullcontext()
"""Of steps that the tier completes in any case."""
ROUND_PAGES = 2
"""The most pages that a round of a sequence takes, if it has at most a page of drafts."""


class Pipeline:
    """Submits the steps that the scheduler decides, up to ``steps_ahead`` before the oldest is
    read. Nothing else submits steps to the runner."""

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
        self.steps_ahead = steps_ahead
        self.steps = 0
        self.steps_read = 0
        self._runner = runner
        self._scheduler = scheduler
        self._slot_manager = scheduler.slot_manager
        self._tenants = tenants
        self._clock = clock
        self._observer = observer
        self._cost = cost
        self._speculative = speculative
        self._mask_words = mask_words(runner.model.config.vocab)
        self.cancels = StepCancels()
        self._abandons = isinstance(runner.tier, AbandonsSteps)
        self._starting: Starting | None = None
        self._in_flight: deque[Step] = deque()
        self._latest: Step | None = None
        self._steady: SteadyDecode | None = None
        self._round: SteadyRound | None = None
        self._read_at = 0.0
        self._read: int | None = None

    def replan(self) -> None:
        """Let the scheduler decide the next step: a sequence was admitted, left or stopped."""
        self._steady = None

    def clear(self) -> None:
        """Forget the steps in flight and abandon them; the tier has its own copy of their
        inputs."""
        for step in self._unread:
            step.token.cancel()
        self._in_flight.clear()
        self._latest = self._steady = self._round = self._starting = None

    def leave(self, request_ids: Iterable[int]) -> bool:
        """Abandon steps that only compute for requests that leave; returns whether the tier can.
        Any thread may call this."""
        if self._abandons:
            self.cancels.add(request_ids)
        return self._abandons

    def abandon_unneeded(self) -> None:
        """Raise StepAbandoned if all requests of the steps in flight are leaving."""
        with self._waiting():
            pass

    def drop_abandoned(self) -> Abandoned:
        """Drop the steps in flight and the one that is being submitted. They count as computed."""
        admitted, begun = self._scheduler.counts.admitted, self._starting
        first: dict[int, tuple[Sequence, int]] = {}
        if self._in_flight and self._slot_manager.disk is not None:
            self._slot_manager.disk.abandoned(self._in_flight[0].number)
        for unread in self._unread:
            for sequence, chunk in zip(unread.sequences, unread.chunks, strict=True):
                first.setdefault(sequence.order, (sequence, chunk.start))
        for step in self._in_flight:
            admitted, self.steps_read = min(admitted, step.admitted), step.number + 1
            self._count(step.counted)
        if begun is not None:
            self._count(self._counted(begun.sequences, begun.chunks, begun.rows))
        self.clear()
        return Abandoned(list(first.values()), admitted)

    @property
    def _unread(self) -> list[Step | Starting]:
        """The steps in flight and the one that is being submitted."""
        return [*self._in_flight, *([] if self._starting is None else [self._starting])]

    @property
    def unread_tokens(self) -> tuple[int, ...]:
        """The tokens of each of them. Any thread may ask."""
        return tuple(sum([count for _, _, count in step.chunks]) for step in self._unread)

    def _waiting(self) -> AbstractContextManager[None]:
        """A context in which the steps in flight and the one that is being submitted are abandoned
        once nobody needs them. If a sequence of theirs has lost its slot, none is abandoned, since
        others may find what these steps compute of it."""
        if not self._abandons:
            return UNCANCELLED
        # Lists, since a generator that is closed early may lose Ctrl-C.
        current = [here for step in self._in_flight for here in step.of_current_admission()]
        awaited = [Awaited(step.token, step.requests) for step in self._in_flight]
        if (begun := self._starting) is not None:
            current += [sequence.running for sequence in begun.sequences]
            ids = [sequence.request.id for sequence in begun.sequences]
            awaited.append(Awaited(begun.token, ids))
        return self.cancels.waiting(awaited if False not in current else [])

    def fill(self) -> None:
        """Submit steps until ``steps_ahead`` are in flight or there is nothing to compute."""
        while self._in_flight and not any(self._in_flight[0].of_current_admission()):
            self._drop_oldest()
        while len(self._in_flight) <= self.steps_ahead and self._start():
            pass

    def fill_idle(self) -> None:
        """With drafts, submit the next step before consumers take the tokens just read, if the
        device would wait."""
        drafts = self._speculative is not None
        if drafts and not self._in_flight and self._runner.tier.info.asynchronous:
            self.fill()

    def read(self) -> tuple[StepOutput, Iterator[Computed]] | None:
        """Wait for the oldest step. Returns its output, and its part for each sequence that still
        has the slot it was computed for; None if no step is in flight."""
        if not self._in_flight:
            return None
        step = self._in_flight[0]
        with self._waiting():
            output = self._runner.collect(step.submission)
        self._in_flight.popleft()
        self.steps_read = step.number + 1
        now = self._clock()
        self._count(step.counted)
        if self._speculative is not None:
            self._continue(step, output, now, self._speculative)
        self._observe(step, now)
        return output, self._computed(step)

    def _continue(
        self, step: Step, output: StepOutput, now: float, speculative: SpeculativeDecoder
    ) -> None:
        """Submit the round behind a step with drafts of every sequence that runs before its tokens
        are taken, since the device would wait. Only where no other decision could be made: nobody
        waits for a slot or is stalled, and there are pages. So who has tokens in this step is in
        the next one, and if that is abandoned, nobody needs them."""
        sequences, manager = step.sequences, self._slot_manager
        if any(one.stalled for one in sequences):
            return
        follows = not self._in_flight and not self._scheduler.waiting and manager.disk is None
        if follows:
            pages = min([manager.memory.available(one.tenant) for one in sequences])
            follows = pages >= ROUND_PAGES * len(sequences)
        known = speculative.after_result(sequences, step.admissions, output, follows)
        if not known or not follows:
            return
        taken = [one.known for one in sequences]
        for one, count in zip(sequences, known, strict=True):
            one.known = count
        try:
            for one, chunk in zip(sequences, step.chunks, strict=True):
                speculative.follow(one, chunk.start, now)
            self._start_planned()
        finally:
            # The caller takes the tokens.
            for one, count in zip(sequences, taken, strict=True):
                one.known = count

    def recheck_waiting(self) -> None:
        """Look at the waiting sequences before the next step, although nothing changed in the
        engine."""
        self._scheduler.recheck_waiting()

    def load_more(self) -> bool:
        """Load pages that were read from disk: only a block each while steps are in flight, since
        those would wait. Returns whether a sequence has all of its pages now."""
        loaded = self._scheduler.load_more(whole=not self._in_flight)
        if loaded:
            self.replan()
        return loaded

    def wait(self) -> None:
        """Wait until the device has computed the steps in flight. Raises if one failed."""
        for step in self._in_flight:
            self._runner.tier.wait(step.submission.fence)

    def drain(self) -> None:
        """Drop the steps in flight, waiting for them if there is a disk cache."""
        while self._in_flight:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the oldest step. With a disk cache wait for it, since pages that it computed must
        not be written if it fails."""
        step = self._in_flight[0]
        if self._slot_manager.disk is not None:
            self._runner.collect(step.submission)
            self.steps_read = step.number + 1
        self._in_flight.popleft()
        self._count(step.counted)

    def _start(self) -> bool:
        """Submit the next step; False if there is nothing to compute."""
        steady = self._steady
        if steady is None or not steady.left or self._scheduler.admit():
            return self._start_planned()
        if not self._scheduler.grow(steady.at_page_begin()):
            return self._start_planned()
        before = self._latest
        assert before is not None
        inputs = steady.next()
        self._note_submitted(
            self._submit(inputs, before.sequences, steady.chunks, before.rows),
            before.sequences,
            steady.chunks,
            before.rows,
            before.attended + len(steady.chunks),
        )
        return True

    def _start_planned(self) -> bool:
        self._steady = None
        chunks = self._scheduler.next_chunks()
        if not chunks:
            return False
        table, running = self._slot_manager.table, self._slot_manager.running
        rows = table.rows_of(chunks)
        sequences = [running[slot] for slot, _, _ in chunks]
        admitted = [(sequence.order, sequence.admission) for sequence in sequences]
        tokens, before = [sequence.tokens for sequence in sequences], self._round
        inputs = None if before is None else before.next(admitted, chunks, rows, tokens)
        if inputs is None:
            inputs = table.step_input(chunks, rows, tokens)
            inputs = with_masks(inputs, sequences, chunks, rows, self._mask_words)
            if any(sequence.on_experts is not None for sequence in sequences):
                inputs = replace(inputs, requested=inputs.requested + self._runner.expert_outputs)
        submission = self._submit(inputs, sequences, chunks, rows)
        for slot, start, count in chunks:
            table.computed[slot] = start + count
        attended = sum([count * (2 * start + count + 1) for _, start, count in chunks]) // 2
        self._note_submitted(submission, sequences, chunks, rows, attended)
        self._publish(chunks, sequences)
        self._steady = SteadyDecode.after(table, chunks, rows, inputs)
        masked = any(sequence.masked for sequence in sequences)
        after = None if masked else SteadyRound.after(table, admitted, chunks, rows, inputs)
        self._round = after
        return True

    def _submit(
        self, inputs: StepInput, sequences: list[Sequence], chunks: list[Chunk], rows: list[int]
    ) -> tuple[Submission, CancelToken]:
        if self._speculative is not None:
            self._read = self._speculative.before_step(sequences, chunks)
            if self._read is not None and inputs.plain:
                inputs = replace(inputs, plain=False)
        token = CancelToken()
        if self._abandons:
            inputs = replace(inputs, token=token)
        self._starting = Starting(token, sequences, chunks, rows)
        with self._waiting():
            submission = self._runner.submit(inputs)
        if self._speculative is not None:
            self._speculative.after_step(submission, sequences, chunks)
        return submission, token

    def _note_submitted(
        self,
        submission: tuple[Submission, CancelToken],
        sequences: list[Sequence],
        chunks: list[Chunk],
        rows: list[int],
        attended: int,
    ) -> None:
        memory = self._slot_manager.memory
        self._latest = step = Step(
            self.steps,
            *submission,
            sequences,
            [sequence.admission for sequence in sequences],
            [sequence.request.id for sequence in sequences],
            chunks,
            rows,
            attended,
            self._clock(),
            self._read,
            len(self._scheduler.waiting),
            memory.free,
            memory.cached,
            self._scheduler.counts.admitted,
            self._counted(sequences, chunks, rows),
        )
        self.steps += 1
        if self._slot_manager.disk is not None:
            self._slot_manager.disk.steps = self.steps
        self._in_flight.append(step)
        self._starting = None

    def _count(self, counted: Counted) -> None:
        """Count the tokens of a step towards the rates of its tenants, even if its sequences have
        ended or were preempted."""
        for count, (prefilled, decoded) in counted:
            count(prefilled, decoded)

    def _counted(
        self, sequences: Items[Sequence], chunks: Items[Chunk], rows: Items[int]
    ) -> Counted:
        """Tokens that a step prefills and decodes for each tenant, without drafts."""
        counts: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        for sequence, (_, start, tokens), requested in zip(sequences, chunks, rows, strict=True):
            of_tenant = counts[sequence.request.tenant]
            sampled = requested > 0 and sequence.samples and start + tokens >= sequence.known
            drafted = requested > 1 and sequence.drafted(start, requested)
            of_tenant[0] += 0 if drafted else tokens - sampled
            of_tenant[1] += sampled
        return [(self._tenants.counter(tenant), count) for tenant, count in counts.items()]

    def _publish(self, chunks: list[Chunk], sequences: list[Sequence]) -> None:
        """Publish whole pages of prompts, and save recurrent states at the cuts."""
        table = self._slot_manager.table
        for (slot, start, count), sequence in zip(chunks, sequences, strict=True):
            if not sequence.running:
                # A mask provider may have cancelled it.
                continue
            if start < table.known[slot]:
                self._slot_manager.publish(sequence)
            if start + count == table.cut[slot] and not table.draft[slot]:
                self._slot_manager.save_state(sequence, start + count)

    def _observe(self, step: Step, now: float) -> None:
        seconds = now - max(step.began, self._read_at)
        self._read_at = now
        tokens = sum([count for _, _, count in step.chunks])
        self._cost.observe(Load(tokens, step.attended), seconds)
        if self._speculative is not None and tokens == len(step.chunks) == sum(step.rows):
            self._speculative.note_plain(step.sequences, seconds, step.read)
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
        end, token, tokens = 0, 0, sum([count for _, _, count in step.chunks])
        for sequence, (_, start, count), rows, current in zip(
            step.sequences, step.chunks, step.rows, step.of_current_admission(), strict=True
        ):
            first, end, token = end, end + rows, token + count
            # A sequence that ended or was preempted may be in steps in flight.
            if current:
                yield Computed(sequence, start, start + count, first, end, token - count, tokens)
