"""The step loop: waiting requests -> slots and pages -> steps of the runner -> token events.

Several sequences share a step; which ones, in which chunks and in which pages changes no bit of
any of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from contract.errors import RequestError
from contract.records import QUERY_TOKEN, SAMPLING
from contract.types import FinishReason, Request, SamplingParams, TokenEvent
from reference.limits import pages_for
from reference.memory.pages import PagePool
from reference.limits import RING_STEPS
from reference.runner import ModelRunner, StepInput, Submission
from reference.sched.planner import Chunk, Pending, plan_step

LogitsSink = Callable[[int, NDArray[np.float32]], None]
"""Receives (first position, float32[positions, vocab]) for every chunk; the array is its own."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way: its tokens so far and what of them is in the cache."""

    request: Request
    tokens: list[int]
    on_logits: LogitsSink | None
    slot: int = -1
    computed: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step under way: what of which sequence it computes, and the rows each wants."""

    submission: Submission
    parts: tuple[tuple[Sequence, Chunk, int], ...]


class Engine:
    """Runs any number of requests on one runner, ``limits.slots`` of them at a time.

    ``chunk_tokens`` caps the prefill tokens of a step; ``end_of_generation`` are the token ids
    that finish a sequence; ``page_order`` is the order the pool hands out its pages in.
    ``steps_ahead``: decode steps submitted before their predecessor's tokens are read, at most
    RING_STEPS - 1; None is one where the tier queues work, else none.
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
        capacity, limits = runner.capacity, runner.limits
        if capacity.tokens <= limits.slots or capacity.rows < limits.slots:
            raise ValueError("a step must hold a decode token of every slot and one of prefill")
        self.runner = runner
        self.end_of_generation = end_of_generation
        self.chunk_tokens = min(chunk_tokens or capacity.tokens, capacity.tokens - limits.slots)
        self.pool = PagePool(limits.pages, page_order)
        self._page_table = np.zeros((limits.slots, limits.slot_pages), np.int32)
        self._free_slots = deque(range(limits.slots))
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._under_way: deque[_Step] = deque()
        if steps_ahead is None:
            steps_ahead = 1 if runner.tier.info.asynchronous else 0
        self._steps_ahead = min(steps_ahead, RING_STEPS - 1)

    def submit(self, request: Request, on_logits: LogitsSink | None = None) -> None:
        """Queue a request. Raises RequestError when it can never run here.

        With ``on_logits`` the logits of every position of the sequence are computed and handed
        over chunk by chunk.
        """
        self._check(request)
        self._waiting.append(Sequence(request, list(request.prompt), on_logits))

    def cancel(self, request_id: int) -> None:
        """Forget a request and free its slot and pages. An unknown id is already finished."""
        self._waiting = deque(s for s in self._waiting if s.request.id != request_id)
        for sequence in list(self._running.values()):
            if sequence.request.id == request_id:
                self._release(sequence)

    @property
    def idle(self) -> bool:
        """True when nothing is waiting or running."""
        return not self._waiting and not self._running

    def run(self) -> Iterator[TokenEvent]:
        """Step until idle."""
        while not self.idle:
            yield from self.step()

    def step(self) -> list[TokenEvent]:
        """Admit what fits, compute one step, return the tokens it produced.

        While decoding is all there is to do, the step after it is already under way on a tier
        that queues work: its queries are the tokens the device has just sampled.
        """
        self._drop_abandoned()
        if not self._under_way:
            self._admit()
            self._under_way.append(self._start())
        while self._may_feed():
            self._under_way.append(self._feed())
        step = self._under_way.popleft()
        output = self.runner.collect(step.submission)
        events = []
        first_row = 0
        for sequence, chunk, count in step.parts:
            logits = output.logits[first_row : first_row + count]
            tokens = output.token[first_row : first_row + count]
            first_row += count
            # A sequence that ended or was cancelled may have been fed one token too many.
            if self._running.get(chunk.slot) is sequence:
                events += self._advance(sequence, chunk, logits, tokens)
        return events

    def _drop_abandoned(self) -> None:
        """Wait out steps nobody looks at any more: the next inputs must not overtake them."""
        while self._under_way and not any(
            self._running.get(chunk.slot) is sequence
            for sequence, chunk, _ in self._under_way[0].parts
        ):
            self.runner.collect(self._under_way.popleft().submission)

    def _start(self) -> _Step:
        """Submit a step with inputs from the host."""
        chunks = self._plan()
        query, rows, owners = self._rows(chunks)
        submission = self.runner.submit(
            StepInput(
                query=query,
                output_rows=np.array(rows, np.int32),
                sampling=self._sampling(owners),
                recent=self._recent(owners),
                page_table=self._page_table,
            )
        )
        parts = []
        for chunk in chunks:
            sequence = self._running[chunk.slot]
            parts.append((sequence, chunk, self._row_count(sequence, chunk)))
        return _Step(submission, tuple(parts))

    def _may_feed(self) -> bool:
        """True when the last step under way decodes and all of its sequences surely go on."""
        if self._waiting or len(self._under_way) > self._steps_ahead:
            return False
        for sequence, chunk, count in self._under_way[-1].parts:
            request, known = sequence.request, chunk.start + 1
            if (
                chunk.count != 1
                or count != 1
                or sequence.on_logits is not None
                or self._running.get(chunk.slot) is not sequence
                or known + 1 - len(request.prompt) >= request.max_tokens
                or known + 1 >= self._reach(request)
            ):
                return False
        return True

    def _feed(self) -> _Step:
        """Submit the step after the last one, its queries being what that one samples."""
        last = self._under_way[-1]
        parts = tuple(
            (sequence, Chunk(chunk.slot, chunk.start + 1, 1), 1)
            for sequence, chunk, _ in last.parts
        )
        return _Step(self.runner.feed(last.submission), parts)

    def _check(self, request: Request) -> None:
        limits, vocab = self.runner.limits, self.runner.model.config.vocab
        request.sampling.validate()
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
            needed = pages_for(self._reach(sequence.request))
            if needed > self.pool.free:
                return
            self._waiting.popleft()
            sequence.slot = self._free_slots.popleft()
            sequence.pages = self.pool.take(needed, sequence.slot)
            self._page_table[sequence.slot] = 0
            self._page_table[sequence.slot, :needed] = sequence.pages
            self._running[sequence.slot] = sequence

    def _plan(self) -> tuple[Chunk, ...]:
        pending = [Pending(s.slot, s.computed, len(s.tokens)) for s in self._running.values()]
        chunks = []
        rows = self.runner.capacity.rows
        for chunk in plan_step(pending, self.chunk_tokens):
            sequence = self._running[chunk.slot]
            if sequence.on_logits is not None:
                chunk = Chunk(chunk.slot, chunk.start, min(chunk.count, rows))
            if chunk.count:
                rows -= self._row_count(sequence, chunk)
                chunks.append(chunk)
        return tuple(chunks)

    def _row_count(self, sequence: Sequence, chunk: Chunk) -> int:
        if sequence.on_logits is not None:
            return chunk.count
        last = chunk.start + chunk.count == len(sequence.tokens)
        return int(last and sequence.request.max_tokens > 0)

    def _rows(
        self, chunks: tuple[Chunk, ...]
    ) -> tuple[NDArray[np.void], list[int], list[tuple[Sequence, int]]]:
        """The query tokens, the rows wanted, and whose token at which position each row samples."""
        query = np.zeros(sum(chunk.count for chunk in chunks), QUERY_TOKEN)
        rows: list[int] = []
        owners: list[tuple[Sequence, int]] = []
        first = 0
        for chunk in chunks:
            sequence = self._running[chunk.slot]
            stop = chunk.start + chunk.count
            part = query[first : first + chunk.count]
            part["token"] = sequence.tokens[chunk.start : stop]
            part["slot"] = chunk.slot
            part["position"] = np.arange(chunk.start, stop)
            first += chunk.count
            count = self._row_count(sequence, chunk)
            rows += range(first - count, first)
            owners += [(sequence, position + 1) for position in range(stop - count, stop)]
        return query, rows, owners

    def _sampling(self, owners: list[tuple[Sequence, int]]) -> NDArray[np.void]:
        records = np.zeros(len(owners), SAMPLING)
        for record, (sequence, position) in zip(records, owners, strict=True):
            fill_sampling(record, sequence.request.sampling, position)
        return records

    def _recent(self, owners: list[tuple[Sequence, int]]) -> NDArray[np.int32]:
        recent = np.full((len(owners), self.runner.limits.recent_tokens), -1, np.int32)
        for row, (sequence, position) in zip(recent, owners, strict=True):
            sampling = sequence.request.sampling
            if sampling.penalizes:
                tail = sequence.tokens[max(0, position - sampling.repeat_last_n) : position]
                places = np.arange(position - len(tail), position) % sampling.repeat_last_n
                row[places] = tail
        return recent

    def _advance(
        self,
        sequence: Sequence,
        chunk: Chunk,
        logits: NDArray[np.float32],
        tokens: NDArray[np.int32],
    ) -> list[TokenEvent]:
        sequence.computed = chunk.start + chunk.count
        if sequence.on_logits is not None:
            sequence.on_logits(chunk.start, logits.copy())
        if sequence.computed < len(sequence.tokens):
            return []
        request = sequence.request
        if request.max_tokens == 0:
            return [self._finish(sequence, -1, FinishReason.LENGTH)]
        token = int(tokens[-1])
        if token < 0:
            return [self._finish(sequence, -1, FinishReason.ERROR)]
        position = len(sequence.tokens)
        if token in self.end_of_generation and not request.ignore_end:
            return [self._finish(sequence, token, FinishReason.STOP)]
        sequence.tokens.append(token)
        if sequence.generated >= request.max_tokens or position + 1 >= self._reach(request):
            return [self._finish(sequence, token, FinishReason.LENGTH)]
        return [TokenEvent(request.id, token, position, None)]

    def _finish(self, sequence: Sequence, token: int, reason: FinishReason) -> TokenEvent:
        self._release(sequence)
        return TokenEvent(sequence.request.id, token, sequence.computed, reason)

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence.slot]
        self.pool.give_back(sequence.pages)
        self._free_slots.append(sequence.slot)


def fill_sampling(record: np.void, sampling: SamplingParams, position: int) -> None:
    """Write the device record of ``sampling`` for the token at ``position``."""
    record["temperature"] = sampling.temperature
    record["top_p"] = sampling.top_p
    record["min_p"] = sampling.min_p
    record["repeat_penalty"] = sampling.repeat_penalty
    record["presence_penalty"] = sampling.presence_penalty
    record["frequency_penalty"] = sampling.frequency_penalty
    record["top_k"] = sampling.top_k
    record["seed_low"] = sampling.seed & 0xFFFFFFFF
    record["seed_high"] = sampling.seed >> 32
    record["position"] = position
    record["repeat_last_n"] = sampling.repeat_last_n if sampling.penalizes else 0
