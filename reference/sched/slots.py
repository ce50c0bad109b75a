"""What the host knows of every slot, as arrays, and the inputs of a step made of it.

Nothing here takes time per slot in Python: a step of 64 sequences costs what one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import PAGE_TOKENS
from contract.records import LAST_TOKEN, LOGIT_BIAS, QUERY_TOKEN, SAMPLING
from contract.types import SamplingParams
from reference.limits import Limits
from reference.runner import HIDDEN, LOG_PROBABILITIES, LOGITS, StepInput
from reference.sched.planner import PENDING

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
    step with the last known one. Of the ``listed`` ones the log-probabilities are wanted.
    """

    def __init__(self, limits: Limits) -> None:
        slots = limits.slots
        self.page_table = np.zeros((slots, limits.slot_pages), np.int32)
        self.page_versions = np.zeros(slots, np.int64)
        self._page_changes = 0
        # Together, so that those of some slots are picked at once.
        self._numbers = np.zeros((6, slots), np.int32)
        self.page_count, self.computed, self.known, self.end, self.cut, self.draft = self._numbers
        self._flags = np.zeros((6, slots), bool)
        self.every_row, self.hidden, self.samples, self.lockstep, self.stalled, self.listed = (
            self._flags
        )
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
        self.listed[slot] = listed
        self.hidden[slot] = hidden
        self._sampling[slot] = sampling_record(sampling, slot)
        self._bias[slot, : len(bias)] = bias
        self._sampling["bias_first"][slot] = slot * self._bias.shape[1]
        self._sampling["bias_count"][slot] = len(bias)

    def add_pages(self, slot: int, pages: Sequence[int]) -> None:
        """The next pages of the slot's sequence."""
        count = int(self.page_count[slot])
        self.page_table[slot, count : count + len(pages)] = pages
        self.page_count[slot] = count + len(pages)
        self._page_changes += 1
        self.page_versions[slot] = self._page_changes

    def pending(self, slots: Int32) -> NDArray[np.void]:
        """PENDING of ``slots``: the rest of what is known, or the one token that comes next."""
        _, computed, known, end, cut, draft = self._numbers.take(slots, 1)
        _, _, _, lockstep, stalled, _ = self._flags.take(slots, 1)
        following = np.minimum(computed + ~lockstep, end)
        length = np.where(computed < known, known + draft, following)
        length = np.where(computed < cut, np.minimum(length, cut), length)
        pending = np.empty(len(slots), PENDING)
        pending["slot"], pending["computed"] = slots, computed
        pending["length"] = np.where(stalled, computed, length)
        pending["draft"] = draft
        return pending

    def missing_pages(self, chunks: NDArray[np.void]) -> Int32:
        """How many more pages each chunk's sequence needs before the chunk can be computed."""
        stop = chunks["start"] + chunks["count"]
        missing = -(-stop // PAGE_TOKENS) - self.page_count[chunks["slot"]]
        wanted: Int32 = np.maximum(missing, 0).astype(np.int32)
        return wanted

    def rows_of(self, chunks: NDArray[np.void]) -> Int32:
        """Rows of logits each chunk needs."""
        count = chunks["count"]
        _, _, known, _, _, draft = self._numbers.take(chunks["slot"], 1)
        every, _, samples, *_ = self._flags.take(chunks["slot"], 1)
        last = (chunks["start"] + count >= known) & samples
        return np.where(every | (draft > 0), count, last).astype(np.int32)

    def within_rows(self, chunks: NDArray[np.void], most: int) -> NDArray[np.void]:
        """Shorten chunks that want logits of every position to the ``most`` rows a step has."""
        if not self.every_row[chunks["slot"]].any():
            return chunks
        kept = np.zeros(len(chunks), bool)
        for index in range(len(chunks)):
            if self.every_row[chunks["slot"][index]]:
                chunks["count"][index] = min(chunks["count"][index], most)
            rows = int(self.rows_of(chunks[index : index + 1])[0])
            kept[index] = chunks["count"][index] > 0 and rows <= most
            most -= rows if kept[index] else 0
        return chunks[kept]

    def step_input(
        self, chunks: NDArray[np.void], rows: Int32, tokens: Sequence[Int32]
    ) -> StepInput:
        """The inputs of a step over ``chunks``, ``rows`` rows of each.

        ``tokens`` gives what the host knows of each chunk's sequence.
        """
        slot, first, count = chunks["slot"], chunks["start"], chunks["count"]
        ends = count.cumsum()
        query = np.empty(int(ends[-1]), QUERY_TOKEN)
        query["token"], query["flags"] = LAST_TOKEN, 0
        query["slot"] = slot.repeat(count)
        query["position"] = np.arange(len(query)) + (first - ends + count).repeat(count)
        for index in (first < self.known[slot]).nonzero()[0].tolist():
            start, stop = int(first[index]), int(ends[index])
            length = int(count[index])
            query["token"][stop - length : stop] = tokens[index][start : start + length]
        row_ends = rows.cumsum()
        output_rows = np.arange(int(row_ends[-1])) + (ends - row_ends).repeat(rows)
        sampling = self._sampling[query["slot"][output_rows]]
        sampling["position"] = query["position"][output_rows] + 1
        return StepInput(
            query=query,
            output_rows=output_rows.astype(np.int32),
            sampling=sampling,
            page_table=self.page_table,
            wanted=self._wanted(chunks["slot"]),
            bias=self._bias.reshape(-1) if sampling["bias_count"].any() else None,
            page_versions=self.page_versions,
        )

    def _wanted(self, slots: Int32) -> tuple[str, ...]:
        every, hidden = self.every_row[slots], self.hidden[slots]
        logits = (LOGITS,) if (every & ~hidden).any() else ()
        states = (HIDDEN,) if (every & hidden).any() else ()
        return (*logits, *states, *(LOG_PROBABILITIES if self.listed[slots].any() else ()))


@dataclass(slots=True)
class SteadyDecode:
    """Steps of one token for each of the same sequences: each is the one before, a position on.

    ``left`` steps follow before one of the sequences has its last or needs a page. Valid until a
    sequence joins or leaves.
    """

    table: SlotTable
    chunks: NDArray[np.void]
    inputs: StepInput
    left: int

    @classmethod
    def after(
        cls, table: SlotTable, chunks: NDArray[np.void], rows: Int32, inputs: StepInput
    ) -> SteadyDecode | None:
        """What follows a step, None where that is more than one token for each of its sequences."""
        slots = chunks["slot"]
        if table.every_row[slots].any() or (rows != 1).any() or (chunks["count"] != 1).any():
            return None
        if table.lockstep[slots].any():
            return None
        ends = np.minimum(table.end[slots], table.page_count[slots] * PAGE_TOKENS)
        cut = table.cut[slots]
        ends = np.where(cut > table.computed[slots], np.minimum(ends, cut), ends)
        left = int((ends - table.computed[slots]).min())
        return cls(table, chunks, inputs, left) if left > 0 else None

    def next(self) -> tuple[NDArray[np.void], StepInput]:
        """The chunks and the inputs of the next step."""
        self.left -= 1
        self.chunks = self.chunks.copy()
        self.chunks["start"] += 1
        self.inputs.query["token"] = LAST_TOKEN
        self.inputs.query["position"] += 1
        self.inputs.sampling["position"] += 1
        self.table.computed[self.chunks["slot"]] += 1
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
