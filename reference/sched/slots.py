"""What the host knows of every slot, and the inputs of a step made of it.

Of a step few numbers change, so a slot's are plain integers in lists; only what a device reads is
in arrays, filled for all slots at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import PAGE_TOKENS
from contract.deferred import dataclass
from contract.records import LAST_TOKEN, LOGIT_BIAS, QUERY_TOKEN, SAMPLING
from contract.types import SamplingParams
from reference.limits import Limits
from reference.runner import HIDDEN, LOG_PROBABILITIES, LOGITS, StepInput
from reference.sched.planner import Chunk, Pending

Int32 = NDArray[np.int32]


class SlotTable:
    """The sequences in slots: where each stands, its pages and how it is sampled.

    Positions below ``computed`` were submitted, and there are ``page_count`` pages for them and
    those that come next. The first ``known`` tokens are the host's to give, the others the device
    samples; nothing is computed from position ``end`` on. ``every_row`` marks sequences whose
    logits are wanted at every position, or ``hidden`` states in their place, ``samples`` those that
    go on, ``lockstep`` those whose next step needs the token of the one before on the host. A
    ``stalled`` sequence computes nothing. No chunk reaches across ``cut``, a position where
    something is to be kept. ``draft`` tokens behind the known ones are guesses, computed in one
    step with the last known one. Of the ``listed`` ones the log-probabilities are wanted, the
    ``biased`` ones have logit biases.
    """

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
        self.every_row = [False] * slots
        self.hidden = [False] * slots
        self.samples = [False] * slots
        self.lockstep = [False] * slots
        self.stalled = [False] * slots
        self.listed = [False] * slots
        self.biased = [False] * slots
        self._sampling = np.zeros(slots, SAMPLING)
        self._bias = np.zeros((slots, limits.biases), LOGIT_BIAS)

    def occupy(
        self,
        slot: int,
        *,
        computed: int,
        known: int,
        end: int,
        sampling: SamplingParams,
        every_row: bool,
        samples: bool,
        lockstep: bool,
        bias: NDArray[np.void],
        listed: bool,
        hidden: bool = False,
    ) -> None:
        """Begin a sequence of ``known`` given tokens, of which ``computed`` are in its pages.

        ``bias`` is LOGIT_BIAS[n] with n at most ``limits.biases``.
        """
        self.page_count[slot] = self.cut[slot] = self.draft[slot] = 0
        self.computed[slot], self.known[slot], self.end[slot] = computed, known, end
        self.every_row[slot], self.samples[slot] = every_row, samples
        self.lockstep[slot], self.stalled[slot] = lockstep, False
        self.listed[slot], self.hidden[slot] = listed, hidden
        self.biased[slot] = len(bias) > 0
        self._sampling[slot] = sampling_record(sampling, slot)
        self._bias[slot, : len(bias)] = bias
        self._sampling["bias_first"][slot] = slot * self._bias.shape[1]
        self._sampling["bias_count"][slot] = len(bias)

    def add_pages(self, slot: int, pages: Sequence[int]) -> None:
        """The next pages of the slot's sequence."""
        count = self.page_count[slot]
        self.page_table[slot, count : count + len(pages)] = pages
        self.page_count[slot] = count + len(pages)
        self._page_changes += 1
        self.page_versions[slot] = self._page_changes

    def pending(self, slots: Iterable[int]) -> list[Pending]:
        """What can be computed of ``slots``: the rest of what is known, or the one token that
        comes next."""
        return [
            Pending(slot, self.computed[slot], self._length(slot), self.draft[slot])
            for slot in slots
        ]

    def _length(self, slot: int) -> int:
        """How many tokens of a slot's sequence can be computed by now."""
        computed, known, cut = self.computed[slot], self.known[slot], self.cut[slot]
        if self.stalled[slot]:
            return computed
        if computed < known:
            length = known + self.draft[slot]
        else:
            length = min(computed + (not self.lockstep[slot]), self.end[slot])
        return min(length, cut) if computed < cut else length

    def missing_pages(self, chunks: Iterable[Chunk]) -> list[int]:
        """How many more pages each chunk's sequence needs before the chunk can be computed."""
        return [
            max(0, -(-(start + count) // PAGE_TOKENS) - self.page_count[slot])
            for slot, start, count in chunks
        ]

    def rows_of(self, chunks: Iterable[Chunk]) -> list[int]:
        """Rows of logits each chunk needs."""
        return [
            count
            if self.every_row[slot] or self.draft[slot]
            else int(self.samples[slot] and start + count >= self.known[slot])
            for slot, start, count in chunks
        ]

    def within_rows(self, chunks: list[Chunk], most: int) -> list[Chunk]:
        """Shorten chunks that want logits of every position to the ``most`` rows a step has."""
        if not any(self.every_row[slot] for slot, _, _ in chunks):
            return chunks
        kept = []
        for chunk in chunks:
            if self.every_row[chunk.slot]:
                chunk = chunk._replace(tokens=min(chunk.tokens, most))
            (rows,) = self.rows_of((chunk,))
            if chunk.tokens and rows <= most:
                kept.append(chunk)
                most -= rows
        return kept

    def step_input(
        self, chunks: Sequence[Chunk], rows: Sequence[int], tokens: Sequence[Int32]
    ) -> StepInput:
        """The inputs of a step over ``chunks``, ``rows`` rows of each.

        ``tokens`` gives what the host knows of each chunk's sequence.
        """
        total = sum([count for _, _, count in chunks])
        query = np.empty(total, QUERY_TOKEN)
        query["token"], query["flags"] = LAST_TOKEN, 0
        query["slot"] = _all([repeat(slot, count) for slot, _, count in chunks])
        query["position"] = _all([range(start, start + count) for _, start, count in chunks])
        end = 0
        output_rows: list[int] = []
        row_slots: list[int] = []
        positions: list[int] = []
        for (slot, start, count), wanted, known in zip(chunks, rows, tokens, strict=True):
            end += count
            stop = start + count
            if start < self.known[slot]:
                query["token"][end - count : end] = known[start:stop]
            output_rows += range(end - wanted, end)
            row_slots += repeat(slot, wanted)
            positions += range(stop - wanted + 1, stop + 1)
        sampling = self._sampling.take(row_slots)
        sampling["position"] = positions
        return StepInput(
            query=query,
            output_rows=np.array(output_rows, np.int32),
            sampling=sampling,
            page_table=self.page_table,
            wanted=self._wanted(chunks),
            bias=self._bias.reshape(-1) if any(self.biased[s] for s in row_slots) else None,
            page_versions=self.page_versions,
        )

    def _wanted(self, chunks: Iterable[Chunk]) -> tuple[str, ...]:
        """The outputs that somebody asked for."""
        slots = [slot for slot, _, _ in chunks]
        hidden = {self.hidden[slot] for slot in slots if self.every_row[slot]}
        logits = (LOGITS,) if False in hidden else ()
        states = (HIDDEN,) if True in hidden else ()
        listed = LOG_PROBABILITIES if any(self.listed[slot] for slot in slots) else ()
        return (*logits, *states, *listed)


def _all(parts: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


@dataclass(slots=True)
class SteadyDecode:
    """Steps of one token for each of the same sequences: each is the one before, a position on.

    ``left`` steps follow before one of the sequences has its last, needs a page or comes to its
    ``cut``. Valid until a sequence joins or leaves.
    """

    table: SlotTable
    chunks: list[Chunk]
    inputs: StepInput
    left: int

    @classmethod
    def after(
        cls, table: SlotTable, chunks: list[Chunk], rows: Sequence[int], inputs: StepInput
    ) -> SteadyDecode | None:
        """What follows a step, None where that is more than one token for each of its sequences."""
        left = []
        for (slot, _, count), wanted in zip(chunks, rows, strict=True):
            if wanted != 1 or count != 1 or table.every_row[slot] or table.lockstep[slot]:
                return None
            computed, cut = table.computed[slot], table.cut[slot]
            end = min(table.end[slot], table.page_count[slot] * PAGE_TOKENS)
            # The step that reaches a cut is planned: something is kept there.
            left.append((min(end, cut - 1) if cut > computed else end) - computed)
        return cls(table, chunks, inputs, min(left)) if min(left) > 0 else None

    def next(self) -> tuple[list[Chunk], StepInput]:
        """The chunks and the inputs of the next step."""
        self.left -= 1
        self.chunks = [Chunk(slot, start + 1, 1) for slot, start, _ in self.chunks]
        self.inputs.query["token"] = LAST_TOKEN
        self.inputs.query["position"] += 1
        self.inputs.sampling["position"] += 1
        for slot, start, _ in self.chunks:
            self.table.computed[slot] = start + 1
        return self.chunks, self.inputs


def sampling_record(sampling: SamplingParams, slot: int, position: int = 0) -> NDArray[np.void]:
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
