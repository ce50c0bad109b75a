"""The step loop: waiting requests -> slots and pages -> steps of the runner -> token events.

Several sequences share a step, and several steps are under way; which ones, in which chunks and in
which pages changes no bit of any of them. A step is planned from positions alone, which are known
ahead; the tokens stay on the device. So the end of a sequence is seen some steps late, and what was
computed for it beyond is nobody's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from contract.errors import RequestError
from contract.types import FinishReason, Request, TokenEvent
from reference.limits import RING_STEPS, pages_for
from reference.memory.pages import PagePool
from reference.runner import ModelRunner, StepOutput, Submission
from reference.sched.planner import plan_step
from reference.sched.slots import SlotTable, SteadyDecode

LogitsSink = Callable[[int, NDArray[np.float32]], None]
"""Receives (first position, float32[positions, vocab]) for every chunk; the array is its own."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way, and its place. ``last`` is the position its last token may have."""

    request: Request
    prompt: NDArray[np.int32]
    last: int
    on_logits: LogitsSink | None
    slot: int = -1
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step under way: what of which sequence it computes, and the rows of each."""

    submission: Submission
    sequences: list[Sequence]
    chunks: NDArray[np.void]
    rows: NDArray[np.int32]


class Engine:
    """Runs any number of requests on one runner, ``limits.slots`` of them at a time.

    ``chunk_tokens`` caps the prefill tokens of a step; ``end_of_generation`` are the token ids
    that finish a sequence; ``page_order`` is the order the pool hands out its pages in.
    ``steps_ahead``: steps submitted before the oldest one is read, at most RING_STEPS - 1; None is
    one where the tier works while the host plans, else none.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        end_of_generation: frozenset[int] = frozenset(),
        chunk_tokens: int | None = None,
        page_order: Iterable[int] | None = None,
        steps_ahead: int | None = None,
    ) -> None:
        limits = runner.limits
        if limits.step_tokens <= limits.slots or limits.step_rows < limits.slots:
            raise ValueError("a step must hold a decode token of every slot and one of prefill")
        if steps_ahead is None:
            steps_ahead = 1 if runner.tier.info.asynchronous else 0
        if not 0 <= steps_ahead < RING_STEPS:
            raise ValueError(f"steps_ahead is {steps_ahead}, not 0 to {RING_STEPS - 1}")
        self.runner = runner
        self.end_of_generation = end_of_generation
        self.steps_ahead = steps_ahead
        most = limits.step_tokens - limits.slots
        self.chunk_tokens = min(chunk_tokens or most, most)
        self.pool = PagePool(limits.pages, page_order)
        self._slots = SlotTable(limits)
        self._free_slots = deque(range(limits.slots))
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._under_way: deque[_Step] = deque()
        self._latest: _Step
        self._steady: SteadyDecode | None = None
        self._live: set[int] = set()

    def submit(self, request: Request, on_logits: LogitsSink | None = None) -> None:
        """Queue a request. Raises RequestError when it can never run here, or when a request with
        its id waits or runs.

        With ``on_logits`` the logits of every position of the sequence are computed and handed
        over chunk by chunk.
        """
        self._check(request)
        self._live.add(request.id)
        self._steady = None
        prompt = np.array(request.prompt, np.int32)
        self._waiting.append(Sequence(request, prompt, self._reach(request) - 1, on_logits))

    def cancel(self, request_id: int) -> None:
        """Forget a request and free its slot and pages. An unknown id is already finished."""
        if request_id not in self._live:
            return
        self._live.remove(request_id)
        self._waiting = deque(s for s in self._waiting if s.request.id != request_id)
        for sequence in list(self._running.values()):
            if sequence.request.id == request_id:
                self._release(sequence)

    @property
    def idle(self) -> bool:
        """True when nothing is waiting or running."""
        return not self._live

    def run(self) -> Iterator[TokenEvent]:
        """Step until idle."""
        while not self.idle:
            yield from self.step()

    def step(self) -> list[TokenEvent]:
        """Submit what may be under way, wait for the oldest step, return the tokens it produced.

        An exception, a KeyboardInterrupt among them, ends every request that was running without
        an event; those that wait stay.
        """
        try:
            self._drop_abandoned()
            while len(self._under_way) <= self.steps_ahead and self._start():
                pass
            if not self._under_way:
                return []
            step = self._under_way[0]
            output = self.runner.collect(step.submission)
            self._under_way.popleft()
            return self._events(step, output)
        except BaseException:
            for sequence in list(self._running.values()):
                self._finish(sequence)
            self._under_way.clear()
            raise

    def _drop_abandoned(self) -> None:
        """Forget steps nobody looks at any more; the tier has its own copy of their inputs."""
        while self._under_way and not any(map(self._runs, self._under_way[0].sequences)):
            self._under_way.popleft()

    def _runs(self, sequence: Sequence) -> bool:
        return self._running.get(sequence.slot) is sequence

    def _start(self) -> bool:
        """Submit the next step; False when there is nothing to compute."""
        steady = self._steady
        if steady is None or not steady.left:
            return self._start_planned()
        chunks, inputs = steady.next()
        before = self._latest
        submission = self.runner.submit(inputs)
        self._follow(_Step(submission, before.sequences, chunks, before.rows))
        return True

    def _start_planned(self) -> bool:
        self._admit()
        slots = self._slots
        running = np.fromiter(self._running, np.int32, len(self._running))
        chunks = plan_step(slots.pending(running), self.chunk_tokens)
        if slots.every_row[running].any():
            chunks = self._within_rows(chunks)
        if not len(chunks):
            return False
        rows = slots.rows_of(chunks)
        sequences = [self._running[slot] for slot in chunks["slot"].tolist()]
        inputs = slots.step_input(chunks, rows, [sequence.prompt for sequence in sequences])
        slots.computed[chunks["slot"]] += chunks["count"]
        self._follow(_Step(self.runner.submit(inputs), sequences, chunks, rows))
        # Whoever waits would be looked at again only when somebody leaves.
        self._steady = SteadyDecode.after(slots, chunks, rows, inputs)
        return True

    def _follow(self, step: _Step) -> None:
        self._under_way.append(step)
        self._latest = step

    def _within_rows(self, chunks: NDArray[np.void]) -> NDArray[np.void]:
        """Shorten chunks that want logits of every position to the rows a step has."""
        left = self.runner.limits.step_rows
        kept = np.zeros(len(chunks), bool)
        for index in range(len(chunks)):
            if self._slots.every_row[chunks["slot"][index]]:
                chunks["count"][index] = min(chunks["count"][index], left)
            rows = int(self._slots.rows_of(chunks[index : index + 1])[0])
            kept[index] = chunks["count"][index] > 0 and rows <= left
            left -= rows if kept[index] else 0
        return chunks[kept]

    def _check(self, request: Request) -> None:
        limits, vocab = self.runner.limits, self.runner.model.config.vocab
        request.sampling.validate()
        if request.id in self._live:
            raise RequestError("id", f"is {request.id}, that of a request still under way")
        if not request.prompt:
            raise RequestError("prompt", "is empty; give at least one token")
        if any(not 0 <= token < vocab for token in request.prompt):
            raise RequestError("prompt", f"holds a token id outside 0 to {vocab - 1}")
        if len(request.prompt) > limits.context:
            raise RequestError(
                "prompt",
                f"is {len(request.prompt)} tokens, the context is {limits.context}; "
                "shorten it or raise --context",
            )
        if pages_for(self._reach(request)) > limits.pages:
            raise RequestError("max_tokens", "needs more KV pages than the pool has")
        if request.sampling.penalizes and request.sampling.repeat_last_n > limits.recent_tokens:
            raise RequestError("repeat_last_n", f"is at most {limits.recent_tokens}")

    def _reach(self, request: Request) -> int:
        return min(len(request.prompt) + request.max_tokens, self.runner.limits.context)

    def _admit(self) -> None:
        while self._waiting and self._free_slots:
            sequence = self._waiting[0]
            request = sequence.request
            needed = pages_for(sequence.last + 1)
            if needed > self.pool.free:
                return
            self._waiting.popleft()
            sequence.slot = self._free_slots.popleft()
            sequence.pages = self.pool.take(needed, sequence.slot)
            self._running[sequence.slot] = sequence
            # The last token of a sequence is sampled, not computed.
            length = len(request.prompt)
            self._slots.occupy(
                sequence.slot,
                sequence.pages,
                known=length,
                end=max(length, sequence.last),
                sampling=request.sampling,
                every_row=sequence.on_logits is not None,
                samples=request.max_tokens > 0,
            )

    def _events(self, step: _Step, output: StepOutput) -> list[TokenEvent]:
        events = []
        tokens = output.token.tolist()
        starts = step.chunks["start"].tolist()
        stops = (step.chunks["start"] + step.chunks["count"]).tolist()
        lasts = np.cumsum(step.rows).tolist()
        running, ends = self._running, self.end_of_generation
        for sequence, start, stop, rows, last in zip(
            step.sequences, starts, stops, step.rows.tolist(), lasts, strict=True
        ):
            # A sequence that ended or was cancelled may be in steps that were under way.
            if running.get(sequence.slot) is not sequence:
                continue
            if sequence.on_logits is not None:
                sequence.on_logits(start, output.logits[last - rows : last].copy())
            if stop < len(sequence.prompt):
                continue
            token = tokens[last - 1] if rows else -1
            if token >= 0 and stop < sequence.last and token not in ends:
                events.append(TokenEvent(sequence.request.id, token, stop))
            else:
                events.append(self._last_event(sequence, stop, token))
        return events

    def _last_event(self, sequence: Sequence, position: int, token: int) -> TokenEvent:
        """What ``token``, sampled for ``position``, means where it may end its sequence."""
        request = sequence.request
        reason = None
        if request.max_tokens == 0:
            token, reason = -1, FinishReason.LENGTH
        elif token < 0:
            reason = FinishReason.ERROR
        elif token in self.end_of_generation and not request.ignore_end:
            reason = FinishReason.STOP
        elif position >= sequence.last:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(sequence)
        return TokenEvent(request.id, token, position, reason)

    def _finish(self, sequence: Sequence) -> None:
        self._live.discard(sequence.request.id)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._steady = None
        del self._running[sequence.slot]
        self.pool.give_back(self.pool.release(sequence.pages))
        self._free_slots.append(sequence.slot)
