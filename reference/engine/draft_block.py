"""Drafts by the draft block (multi-token-prediction layer) that some model files have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from contract.arithmetic import PAGE_TOKENS
from contract.lazy_dataclass import dataclass
from contract.records import LAST_TOKEN, QUERY_TOKEN, RECENT_TOKEN
from reference.draft_shifts import Verification
from reference.engine.drafter import (
    ChainedDrafts,
    ChainedStep,
    DraftRequest,
    Tokens,
    are_frequent,
    sound_drafts,
)
from reference.engine.sequence import Sequence
from reference.hidden_rows import HiddenRows, Indices
from reference.runner import ModelRunner, StepInput
from reference.sched.planner import Chunk
from reference.sched.slots import SlotTable

NO_STEP = 1 << 30
"""A position beyond those of any sequence."""


@dataclass(slots=True)
class _BlockState:
    """The block's state of a sequence: it has keys and values of positions below ``filled``. The
    model has computed hidden states from position ``begin`` on, in submitted steps up to
    ``top``."""

    slot: int
    begin: int
    filled: int
    top: int


class _Part(NamedTuple):
    """Positions ``first`` to ``stop`` - 1 of a sequence with these ``tokens``, for the block to
    compute. If given, ``token`` is the index in the model's latest step of the token at position
    ``start``."""

    own: _BlockState
    first: int
    stop: int
    tokens: Tokens
    start: int = NO_STEP
    token: int = 0


class _Ahead(NamedTuple):
    """The first ``limit`` drafts after ``known`` tokens of a sequence, or at most ``rejected``
    fewer, submitted before its latest tokens were read."""

    own: _BlockState
    known: int
    limit: int
    rejected: int


class _Again(NamedTuple):
    """The latest step of a single sequence that continued a draft. Of the next one only the
    position differs."""

    key: int
    inputs: StepInput


class DraftBlock:
    """Drafts by the draft block of the model itself, whose graph ``runner`` executes.

    The key of a token in the block depends on the hidden state of the position before it, which the
    model stores in a ring per slot. ``before_step`` and ``after_step`` compute the block's keys
    before the ring overwrites those states. The keys lie in the pages of the sequence, so a prefix
    hit finds those of the block as well. A missing hidden state is replaced by a row of zeros: so
    a sequence can be followed from any step on."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._rows = HiddenRows.of(runner.limits)
        self._table: SlotTable | None = None
        self._follows: Callable[[Sequence], bool] = lambda sequence: True
        self._followed: dict[int, _BlockState] = {}
        # Of sequences that are not followed, the positions that have keys.
        self._left: dict[int, int] = {}
        self._wanted: set[int] = set()
        self._ahead: dict[int, _Ahead] = {}
        self._again: _Again | None = None

    def attach(self, table: SlotTable, follows: Callable[[Sequence], bool]) -> None:
        """Use the pages of ``table``, the slot table of the engine. ``follows`` decides whether the
        block follows a new sequence."""
        self._table, self._follows = table, follows
        self._followed.clear()
        self._left.clear()
        self._wanted.clear()
        self._ahead, self._again = {}, None

    def leave(self, key: int) -> None:
        """Stop following a sequence."""
        own = self._followed.pop(key, None)
        self._wanted.discard(key)
        if own is not None:
            self._left[key] = own.filled

    def ready(self, key: int, tokens: Tokens) -> bool:
        """Whether the hidden state that the first draft continues is there. If the block does not
        follow the sequence, it does from the next step on."""
        own = self._followed.get(key)
        if own is None and key in self._left:
            self._wanted.add(key)
        return own is not None and own.begin <= len(tokens) - 2

    def unread(self, key: int, known: int) -> int:
        """How many of the ``known`` tokens of a sequence have no keys in the block."""
        own = self._followed.get(key)
        return known - (self._left.get(key, known) if own is None else own.filled)

    def forget(self, key: int) -> None:
        """Forget a sequence that lost its slot."""
        self._again = None
        self._followed.pop(key, None)
        self._left.pop(key, None)
        self._wanted.discard(key)

    def before_step(self, sequences: Items[Sequence], chunks: Items[Chunk]) -> int | None:
        """Compute the keys of positions whose hidden states the next step would overwrite. Returns
        their number; None if the block follows no sequence of that step."""
        self._ahead = {}
        parts, reads = [], False
        for sequence, (slot, start, count) in zip(sequences, chunks, strict=True):
            own = self._own(sequence, slot, start)
            if own is None:
                continue
            reads = True
            stop = min(start + 1, sequence.known)
            # The key of position ``filled`` needs the hidden state of the position before.
            if start + count - own.filled >= self._rows.ring and own.filled < stop:
                parts.append(_Part(own, own.filled, stop, sequence.tokens))
        self._fill(parts)
        return _tokens_of(parts) if reads else None

    def _own(self, sequence: Sequence, slot: int, start: int) -> _BlockState | None:
        """The block's state of a sequence whose next step starts at position ``start``; None if the
        block does not follow it."""
        key = sequence.order
        wanted = key in self._wanted
        if key in self._followed or not (wanted or key not in self._left) or not sequence.running:
            return self._followed.get(key)
        filled = self._left.setdefault(key, start)
        if wanted or (sequence.samples and self._follows(sequence)):
            self._wanted.discard(key)
            del self._left[key]
            self._followed[key] = _BlockState(slot, start, filled, start)
        return self._followed.get(key)

    def after_step(self, sequences: Items[Sequence], chunks: Items[Chunk]) -> int:
        """Compute the keys of chunks that are longer than the ring. Returns their number, and that
        of the tokens of prompts whose hidden states the step kept."""
        parts, index, kept = [], 0, 0
        for sequence, (_, start, count) in zip(sequences, chunks, strict=True):
            own = self._followed.get(sequence.order)
            if own is not None:
                own.top = max(own.top, start + count)
                stop = min(start + count, sequence.known)
                kept += count if 1 < count == stop - start else 0
                if count > self._rows.ring and own.filled < stop:
                    parts.append(_Part(own, own.filled, stop, sequence.tokens, start, index))
            index += count
        self._fill(parts)
        return kept + _tokens_of(parts)

    def draft(self, sequences: Items[DraftRequest]) -> list[Tokens]:
        """The block's continuations of all sequences in one batch, each with its own sampling."""
        bounded = [self._bounded(one) for one in sequences]
        active = [one for one in bounded if one.limit]
        drafts = iter(ChainedDrafts(self._runner, self._steps(active), len(active)).read())
        return [sound_drafts(next(drafts) if one.limit else []) for one in bounded]

    def begin(self, sequences: Items[DraftRequest]) -> list[Tokens]:
        """Submit the steps of ``draft`` without reading their tokens. Returns the placeholders that
        stand for the tokens in the next step of the model. The block records each draft that it
        continues as recent, and the last one as the last token of its slot."""
        bounded = [self._bounded(one) for one in sequences]
        active = [one for one in bounded if one.limit]
        for step in self._steps(active, self._ahead_of(active), unread=True):
            self._runner.submit(step.inputs)
        return [placeholders(one.limit) for one in bounded]

    def begin_ahead(
        self, sequences: Items[DraftRequest], steps: int, behind: Verification | None = None
    ) -> None:
        """Submit the first ``steps`` steps of ``begin``, those that were not, right after the step
        that computes the last tokens of each sequence; those still on the device are placeholders.
        They follow the tokens that ``behind`` accepts, if given. If the tokens or the numbers of
        drafts turn out different, ``begin`` drafts again, and nothing of these steps is read."""
        bounded = [self._bounded(one) for one in sequences]
        active = [replace(one, limit=min(one.limit, steps)) for one in bounded]
        if not all(one.limit for one in active):
            return
        states = [self._followed[one.key] for one in active]
        filled = [own.filled for own in states]
        if behind is not None and not self._fits(active):
            return
        for step in self._steps(active, self._ahead_of(active), unread=True):
            inputs = step.inputs
            if behind is not None:
                inputs = replace(inputs, behind=behind.of(step.rows))
            self._runner.submit(inputs)
        for own, before in zip(states, filled, strict=True):
            own.filled = before
        rejected = [0] * len(active) if behind is None else [count for _, count in behind.drafts]
        self._ahead = {
            one.key: _Ahead(own, len(one.tokens), one.limit, most)
            for one, own, most in zip(active, states, rejected, strict=True)
        }

    def _ahead_of(self, active: list[DraftRequest]) -> int:
        """The number of steps of a draft that were submitted ahead."""
        ahead, self._ahead = self._ahead, {}
        steps = max((one.limit for one in ahead.values()), default=0)
        if len(active) != len(ahead):
            return 0
        for one in active:
            found = ahead.get(one.key)
            if found is None or found.own is not self._followed[one.key]:
                return 0
            fewer = found.known - len(one.tokens)
            if not 0 <= fewer <= found.rejected or found.limit != min(one.limit, steps):
                return 0
        return steps

    def _bounded(self, one: DraftRequest) -> DraftRequest:
        """The request with no more drafts than the pages of its sequence have room for."""
        assert self._table is not None
        pages = self._table.page_count[one.slot] * PAGE_TOKENS
        room = pages - len(one.tokens) + 1 if one.key in self._followed else 0
        return one if 0 <= one.limit <= room else replace(one, limit=max(0, min(one.limit, room)))

    def _part(self, one: DraftRequest) -> _Part:
        own, known = self._followed[one.key], len(one.tokens)
        return _Part(own, min(own.filled, known - 1), known, one.tokens)

    def _fits(self, active: list[DraftRequest]) -> bool:
        """Whether the tokens that the block has not read are one step."""
        tokens = _tokens_of([self._part(one) for one in active])
        return tokens <= self._runner.limits.step_tokens

    def _steps(
        self, active: list[DraftRequest], ahead: int = 0, *, unread: bool = False
    ) -> Iterator[ChainedStep]:
        """The steps of a draft. The first one computes the tokens that the block has not read, each
        other continues with the token and hidden state that the one before left on the device. The
        first ``ahead`` were submitted before."""
        parts = [self._part(one) for one in active]
        if _tokens_of(parts) > self._runner.limits.step_tokens:
            self._fill([part._replace(stop=part.stop - 1) for part in parts])
            parts = [self._part(one) for one in active]
        for part in parts if ahead else ():
            part.own.filled = part.stop
        most = max((one.limit for one in active), default=0)
        if ahead >= most:
            return
        frequent = are_frequent(active, self._runner.frequent_tokens)
        if active and not ahead:
            ends = np.array([*accumulate(part.stop - part.first for part in parts)], np.int32) - 1
            query, hidden = self._query(parts)
            for part in parts:
                part.own.filled = part.stop
            first = self._input(query, hidden, active, 0, ends)
            first = replace(first, unread=unread, frequent=frequent)
            yield ChainedStep(first, list(range(len(active))))
        for number in range(max(1, ahead), most):
            indices = [n for n, one in enumerate(active) if one.limit > number]
            left = [active[n] for n in indices]
            inputs = self._next_step(left, number)
            if (inputs.unread, inputs.frequent) != (unread, frequent):
                inputs = replace(inputs, unread=unread, frequent=frequent)
            yield ChainedStep(inputs, indices)

    def _next_step(self, left: list[DraftRequest], number: int) -> StepInput:
        """The step that continues with the tokens that the step before it sampled."""
        positions = [len(one.tokens) - 1 + number for one in left]
        again = self._again
        if again is not None and len(left) == 1 and left[0].key == again.key:
            inputs = again.inputs
            # Whoever submits a step has copied its inputs.
            inputs.query["position"], inputs.sampling["position"] = positions[0], positions[0] + 1
            return inputs
        query = np.zeros(len(left), QUERY_TOKEN)
        query["token"], query["position"] = LAST_TOKEN, positions
        query["slot"] = [one.slot for one in left]
        hidden = np.array([self._rows.drafted(one.slot) for one in left], np.int32)
        rows = np.arange(len(left), dtype=np.int32)
        inputs = self._input(query, hidden, left, number, rows)
        self._again = _Again(left[0].key, inputs) if len(left) == 1 else self._again
        return inputs

    def _input(
        self,
        query: np.ndarray,
        hidden: Indices,
        drafted: list[DraftRequest],
        number: int,
        rows: Indices,
    ) -> StepInput:
        """A step over ``query`` that samples draft ``number`` of each sequence in ``drafted``."""
        assert self._table is not None
        slots = [one.slot for one in drafted]
        positions = [len(one.tokens) + number for one in drafted]
        pairs = [(n, self._rows.drafted(slot)) for n, slot in enumerate(slots)]
        return StepInput(
            query,
            rows,
            self._table.plain_sampling(slots, positions),
            self._table.page_table,
            page_versions=self._table.page_versions,
            hidden_rows=hidden,
            hidden_pairs=np.array(pairs, np.int32).reshape(-1, 2),
            unread=True,
            frequent=True,
        )

    def _query(self, parts: list[_Part]) -> tuple[np.ndarray, Indices]:
        """The query tokens of a step over ``parts``, and the row of the hidden state of each."""
        query = np.zeros(_tokens_of(parts), QUERY_TOKEN)
        hidden, end = [], 0
        for part in parts:
            begin, end = end, end + part.stop - part.first
            query["token"][begin:end] = part.tokens[part.first : part.stop]
            query["slot"][begin:end] = part.own.slot
            query["position"][begin:end] = range(part.first, part.stop)
            hidden.append(self._hidden(part))
        return query, hidden[0] if len(hidden) == 1 else np.concatenate(hidden)

    def _hidden(self, part: _Part) -> Indices:
        """The rows of the hidden states of the positions before those of ``part``."""
        own, rows = part.own, self._rows
        before = np.arange(part.first - 1, part.stop - 1, dtype=np.int32)
        if part.first > own.begin and part.first > own.top - rows.ring:
            return rows.in_ring(own.slot, before)
        found = np.where(
            before >= part.start, rows.in_step(before - part.start + part.token), rows.zeros
        )
        in_ring = before >= own.top - rows.ring
        found = np.where(in_ring, rows.in_ring(own.slot, before), found)
        return np.where(before < own.begin, rows.zeros, found).astype(np.int32)

    def _fill(self, parts: list[_Part]) -> None:
        """Compute keys and values of ``parts`` in as many steps as needed."""
        room = self._runner.limits.step_tokens
        taken: list[_Part] = []
        for part in parts:
            for first in range(part.first, part.stop, room):
                piece = part._replace(first=first, stop=min(part.stop, first + room))
                if _tokens_of(taken) + piece.stop - piece.first > room:
                    self._submit(taken)
                    taken = []
                taken.append(piece)
            part.own.filled = part.stop
        self._submit(taken)

    def _submit(self, parts: list[_Part]) -> None:
        if parts:
            none = np.zeros(0, np.int32)
            self._runner.submit(self._input(*self._query(parts), [], 0, none))


@cache
def placeholders(drafts: int) -> Tokens:
    """int32[drafts], the placeholders of drafts that are on the device, read-only."""
    tokens = np.full(drafts, RECENT_TOKEN, np.int32)
    tokens[-1:] = LAST_TOKEN
    tokens.setflags(write=False)
    return tokens


def _tokens_of(parts: list[_Part]) -> int:
    return sum(part.stop - part.first for part in parts)
