"""The host's state of every slot, and the step inputs made from it.

Few values change from step to step, so they are Python integers in lists; only what a device reads
is in arrays, which are filled for all slots at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from contract.arithmetic import PAGE_TOKENS
from contract.arrays import Ints, Records
from contract.lazy_dataclass import dataclass
from contract.records import LAST_TOKEN, LOGIT_BIAS, QUERY_TOKEN, SAMPLING
from contract.types import SamplingParams
from reference.adapter_inputs import ADAPTERS, adapter_entries
from reference.limits import Limits
from reference.runner import HIDDEN, LOG_PROBABILITIES, LOGITS, ROW_DIGEST, StepInput
from reference.sched.planner import Chunk, Pending
from reference.sched.scores import force_rows

NO_ROWS = 1 << 62
"""The value of ``rows_from`` for a sequence that has no row for every position."""


class SlotTable:
    """The progress, pages and sampling parameters of each slot's sequence, as lists by slot.

    - ``computed``: the number of positions submitted. ``page_count``: pages in the page table.
    - ``known``: tokens that the host has; the device samples the others. ``end``: the number of
      positions to compute.
    - ``cut``: a position at which a recurrent state is saved; no chunk without drafts extends
      beyond it.
    - ``draft``: drafted tokens after the known ones, computed in one step with the last known one.
    - ``rows_from``: every position from here on has an output row. ``output`` names what is read of
      it: logits, hidden states, digests, or None. Rows that sample a position before ``scored_to``
      give the prompt's own token.
    - ``samples``: tokens are generated. ``lockstep``: the next step needs the token of the one
      before on the host. ``stalled``, ``loading``: nothing is computed.
    - ``listed``: log-probabilities are requested. ``biased``, ``adapted``: the sequence has logit
      biases, adapters."""

    def __init__(self, limits: Limits) -> None:
        slots = limits.slots
        self.page_table = np.zeros((slots, limits.slot_pages), np.int32)
        self.page_versions = np.zeros(slots, np.int64)
        self._page_changes = 0
        self.page_count = [0] * slots
        self.computed = [0] * slots
        self.known = [0] * slots
        self.end = [0] * slots
        self.cut = [0] * slots
        self.draft = [0] * slots
        self.rows_from = [NO_ROWS] * slots
        self.scored_to = [0] * slots
        self.output: list[str | None] = [None] * slots
        self.samples = [False] * slots
        self.lockstep = [False] * slots
        self.stalled = [False] * slots
        self.loading = [False] * slots
        self.listed = [False] * slots
        self.biased = [False] * slots
        self._sampling = np.zeros(slots, SAMPLING)
        self._records = np.zeros(limits.bias_records, LOGIT_BIAS)
        self._first_bias = limits.score_records
        self._bias = self._records[self._first_bias :].reshape(slots, limits.biases)
        self.adapted = [False] * slots
        self._adapters = np.zeros((slots, limits.adapters), ADAPTERS)

    def occupy(
        self,
        slot: int,
        *,
        computed: int,
        known: int,
        end: int,
        sampling: SamplingParams,
        rows_from: int,
        scored_to: int,
        samples: bool,
        lockstep: bool,
        bias: Records,
        listed: bool,
        output: str | None,
        adapters: tuple[tuple[int, float], ...] = (),
    ) -> None:
        """Start a sequence of ``known`` tokens, of which the first ``computed`` are already in its
        pages.

        ``bias`` is LOGIT_BIAS[n] with n at most ``limits.biases``."""
        self.page_count[slot] = self.cut[slot] = self.draft[slot] = 0
        self.computed[slot], self.known[slot], self.end[slot] = computed, known, end
        self.rows_from[slot], self.scored_to[slot] = rows_from, scored_to
        self.samples[slot], self.output[slot] = samples, output
        self.lockstep[slot], self.stalled[slot], self.loading[slot] = lockstep, False, False
        self.listed[slot] = listed
        self.biased[slot] = len(bias) > 0
        self.adapted[slot] = len(adapters) > 0
        self._adapters[slot] = adapter_entries(adapters, self._adapters.shape[1])
        self._sampling[slot] = sampling_record(sampling, slot)
        self._bias[slot, : len(bias)] = bias
        self._sampling["bias_first"][slot] = self._first_bias + slot * self._bias.shape[1]
        self._sampling["bias_count"][slot] = len(bias)

    def add_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Append pages to those of the slot's sequence."""
        count = self.page_count[slot]
        self.page_table[slot, count : count + len(pages)] = pages
        self.page_count[slot] = count + len(pages)
        self._page_changes += 1
        self.page_versions[slot] = self._page_changes

    def pending(self, slots: Iterable[int]) -> list[Pending]:
        """What can be computed for ``slots``: the rest of the known tokens, or the next token."""
        return [
            Pending(slot, self.computed[slot], self._length(slot), self.draft[slot])
            for slot in slots
        ]

    def _length(self, slot: int) -> int:
        """The number of tokens of a slot's sequence that can be computed now."""
        computed, known, cut = self.computed[slot], self.known[slot], self.cut[slot]
        if self.stalled[slot] or self.loading[slot]:
            return computed
        if computed < known:
            length = known + self.draft[slot]
        else:
            length = min(computed + (not self.lockstep[slot]), self.end[slot])
        return min(length, cut) if computed < cut and not self.draft[slot] else length

    def plain_sampling(self, slots: list[int], positions: list[int]) -> Records:
        """SAMPLING[n] of the tokens at ``positions`` of ``slots``, without penalties and biases."""
        sampling = self._sampling.take(slots)
        sampling["position"] = positions
        sampling["repeat_last_n"] = sampling["bias_count"] = 0
        return sampling

    def missing_pages(self, chunks: Iterable[Chunk]) -> list[int]:
        """The number of pages that the sequence of each chunk lacks for it."""
        held = self.page_count
        needed = [-(-(start + count) // PAGE_TOKENS) - held[slot] for slot, start, count in chunks]
        return needed if min(needed, default=0) >= 0 else [max(0, pages) for pages in needed]

    def rows_of(self, chunks: Iterable[Chunk]) -> list[int]:
        """The number of output rows of each chunk."""
        return [self._rows(*chunk) for chunk in chunks]

    def _rows(self, slot: int, start: int, count: int) -> int:
        """The number of output rows of a chunk, which belong to its last positions."""
        stop = start + count
        if self.draft[slot]:
            return count
        if stop > self.rows_from[slot]:
            return stop - max(start, self.rows_from[slot])
        return int(self.samples[slot] and stop >= self.known[slot])

    def within_rows(self, chunks: list[Chunk], limit: int) -> list[Chunk]:
        """Shorten chunks with a row for every position, so that a step has ``limit`` rows or
        less."""
        if all(self.rows_from[slot] == NO_ROWS for slot, _, _ in chunks):
            return chunks
        shortened = []
        for chunk in chunks:
            slot, start, count = chunk
            if self.rows_from[slot] != NO_ROWS:
                without = max(0, self.rows_from[slot] - start)
                chunk = Chunk(slot, start, min(count, without + limit))
            rows = self._rows(*chunk)
            if chunk.tokens and rows <= limit:
                shortened.append(chunk)
                limit -= rows
        return shortened

    def at_page_ends(self, chunks: list[Chunk]) -> list[Chunk]:
        """Shorten prefill chunks that reach a page boundary to end there, for models whose states
        are saved only at page boundaries."""
        aligned = []
        for slot, start, count in chunks:
            stop = (start + count) // PAGE_TOKENS * PAGE_TOKENS
            inside = start + count < self.known[slot] and stop > start
            aligned.append(Chunk(slot, start, stop - start if inside else count))
        return aligned

    def step_input(
        self, chunks: Sequence[Chunk], rows: Sequence[int], tokens: Sequence[Ints]
    ) -> StepInput:
        """The inputs of a step over ``chunks``, each with its number of output ``rows`` and the
        known ``tokens`` of its sequence."""
        end = 0
        given: list[tuple[int, int, Ints]] = []
        token_slots: list[int] = []
        token_positions: list[int] = []
        output_rows: list[int] = []
        row_slots: list[int] = []
        row_positions: list[int] = []
        scored: list[int] = []
        targets: list[int] = []
        for (slot, start, count), requested, known in zip(chunks, rows, tokens, strict=True):
            begin, end, stop = end, end + count, start + count
            first, last = stop - requested + 1, min(stop + 1, self.scored_to[slot])
            if first < last:
                scored += range(len(row_slots), len(row_slots) + last - first)
                targets += known[first:last].tolist()
            if start < self.known[slot]:
                given.append((begin, end, known[start:stop]))
            if count == 1:
                token_slots.append(slot)
                token_positions.append(start)
            else:
                token_slots += repeat(slot, count)
                token_positions += range(start, stop)
            if requested == 1:
                output_rows.append(end - 1)
                row_slots.append(slot)
                row_positions.append(stop)
            elif requested:
                output_rows += range(end - requested, end)
                row_slots += repeat(slot, requested)
                row_positions += range(stop - requested + 1, stop + 1)
        query = np.zeros(end, QUERY_TOKEN)
        query["token"] = LAST_TOKEN
        for begin, end, known in given:
            query["token"][begin:end] = known
        query["slot"], query["position"] = token_slots, token_positions
        sampling = self._sampling.take(row_slots)
        sampling["position"] = row_positions
        bias = self._records if True in [self.biased[slot] for slot in row_slots] else None
        if scored:
            force_rows(sampling, self._records, scored, targets)
            bias = self._records[: len(scored)] if bias is None else bias
        return StepInput(
            query=query,
            output_rows=np.array(output_rows, np.int32),
            sampling=sampling,
            page_table=self.page_table,
            requested=self._requested(chunks),
            bias=bias,
            page_versions=self.page_versions,
            digested=self._digested(row_slots),
            adapters=self._adapters_of(token_slots),
            plain=not any(self.draft[slot] for slot, _, _ in chunks),
        )

    def _adapters_of(self, token_slots: Sequence[int]) -> Records | None:
        """ADAPTERS[tokens, combined]; None if no token has an adapter."""
        adapted = any(map(self.adapted.__getitem__, set(token_slots)))
        return self._adapters.take(token_slots, axis=0) if adapted else None

    def _digested(self, row_slots: Sequence[int]) -> Ints | None:
        """int32[rows], 1 for rows whose digests are read; None if there is no 1."""
        digested = [self.output[slot] == ROW_DIGEST for slot in row_slots]
        return np.array(digested, np.int32) if True in digested else None

    def _requested(self, chunks: Iterable[Chunk]) -> tuple[str, ...]:
        """The names of the outputs that a sequence in the step requests."""
        outputs: set[str | None] = set()
        listed: tuple[str, ...] = ()
        for slot, start, _ in chunks:
            outputs.add(self.output[slot])
            if self.listed[slot] or start + 1 < self.scored_to[slot]:
                listed = LOG_PROBABILITIES
        return tuple(name for name in (LOGITS, HIDDEN, ROW_DIGEST) if name in outputs) + listed


@dataclass(slots=True)
class SteadyDecode:
    """A run of steps of one token for each of the same sequences: only positions change.

    ``chunks`` are those of the latest step. ``left`` steps follow before a sequence has its last
    token or reaches its ``cut``. Valid until a sequence is admitted or leaves."""

    table: SlotTable
    chunks: list[Chunk]
    inputs: StepInput
    left: int

    @classmethod
    def after(
        cls, table: SlotTable, chunks: list[Chunk], rows: Sequence[int], inputs: StepInput
    ) -> SteadyDecode | None:
        """The run that begins with a step; None if a sequence has more than one token in it."""
        left = []
        for (slot, start, count), requested in zip(chunks, rows, strict=True):
            plain = table.output[slot] in (None, ROW_DIGEST)
            given = start + 1 < table.scored_to[slot] or not plain
            if requested != 1 or count != 1 or given or table.lockstep[slot]:
                return None
            computed, cut, end = table.computed[slot], table.cut[slot], table.end[slot]
            # The step that reaches a cut is planned anew: a state is saved there.
            left.append((min(end, cut - 1) if cut > computed else end) - computed)
        return cls(table, chunks, inputs, min(left)) if min(left) > 0 else None

    def at_page_begin(self) -> list[Chunk]:
        """The chunks of the next step whose position is the first of a page."""
        last = PAGE_TOKENS - 1
        return [
            Chunk(slot, start + 1, 1)
            for slot, start, _ in self.chunks
            if start % PAGE_TOKENS == last
        ]

    def next(self) -> StepInput:
        """The inputs of the next step, for which the sequences have their pages."""
        self.left -= 1
        self.chunks = [Chunk(slot, start + 1, 1) for slot, start, _ in self.chunks]
        self.inputs.query["token"] = LAST_TOKEN
        self.inputs.query["position"] += 1
        self.inputs.sampling["position"] += 1
        computed = self.table.computed
        for slot, start, _ in self.chunks:
            computed[slot] = start + 1
        return self.inputs


class SteadyRound(NamedTuple):
    """The inputs of the latest step, which verified drafts: those of a step with as many drafts of
    the same sequences, with other positions and tokens. ``admitted`` are the order and the
    admission of each sequence."""

    admitted: list[tuple[int, int]]
    chunks: list[Chunk]
    rows: Sequence[int]
    inputs: StepInput

    @classmethod
    def after(
        cls,
        table: SlotTable,
        admitted: list[tuple[int, int]],
        chunks: list[Chunk],
        rows: Sequence[int],
        inputs: StepInput,
    ) -> SteadyRound | None:
        """What a step leaves to the next one; None if it differs in more than that."""
        drafts = all(table.draft[slot] for slot, _, _ in chunks)
        return cls(admitted, chunks, rows, inputs) if drafts else None

    def next(
        self,
        admitted: list[tuple[int, int]],
        chunks: list[Chunk],
        rows: Sequence[int],
        tokens: Sequence[Ints],
    ) -> StepInput | None:
        """The inputs of the next step, see ``SlotTable.step_input``; None if it has others."""
        if rows != self.rows or admitted != self.admitted:
            return None
        counts = [count for _, _, count in chunks]
        if counts != rows or counts != [count for _, _, count in self.chunks]:
            return None
        query, sampling, end = self.inputs.query, self.inputs.sampling, 0
        token, position, sampled = query["token"], query["position"], sampling["position"]
        for (_, start, count), (_, before, _), known in zip(
            chunks, self.chunks, tokens, strict=True
        ):
            begin, end = end, end + count
            token[begin:end] = known[start : start + count]
            position[begin:end] += start - before
            sampled[begin:end] += start - before
        return self.inputs


def sampling_record(sampling: SamplingParams, slot: int, position: int = 0) -> Records:
    """The SAMPLING record, shape [], of the token at ``position`` of ``slot``."""
    record = np.zeros((), SAMPLING)
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
    record["slot"] = slot
    record["repeat_last_n"] = sampling.repeat_last_n if sampling.penalizes else 0
    return record
