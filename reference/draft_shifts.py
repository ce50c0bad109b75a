"""Steps that are submitted before it is known how many drafts the step in front accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from contract.arrays import Bytes, Ints
from contract.draft_shift import WORD_BYTES, DraftShift, SequenceShift, ShiftsInputs, shift_inputs
from contract.ir.inputs import InputLayout
from contract.records import QUERY_TOKEN, SAMPLING
from contract.tier import Buffer, Fence, Tier

QUERY_WORDS, SAMPLING_WORDS = (record.itemsize // WORD_BYTES for record in (QUERY_TOKEN, SAMPLING))
QUERY_POSITION, SAMPLING_POSITION = (
    list(record.names or ()).index("position") for record in (QUERY_TOKEN, SAMPLING)
)
"""The words of the position in the two records, whose fields are a word each."""


class Verification(NamedTuple):
    """A step in flight that verifies drafts of each of its sequences: ``drafts`` are the number of
    the first event and that of drafts of each. Its events are in ``ring``."""

    fence: Fence
    ring: Buffer
    drafts: Sequence[tuple[int, int]]

    def of(self, sequences: Sequence[int]) -> Verification:
        """For a step of some of the sequences alone."""
        return self._replace(drafts=[self.drafts[number] for number in sequences])


def shift_behind(
    behind: Verification | None,
    layout: InputLayout,
    tokens: int,
    rows: Ints,
    inputs: Bytes,
    tier: Tier,
) -> DraftShift | None:
    """How the inputs of a step of ``tokens`` tokens and of ``rows`` change if drafts in front of it
    are rejected; None if it is ``behind`` none. Where the tier cannot change them, waits for the
    step in front, changes ``inputs``, and returns None.

    The step samples a row of each sequence in ``behind``. It has a token of each, which moves
    itself, or several of each, whose row moves."""
    if behind is None:
        return None
    query, output_rows, sampling = (
        layout.offsets[name] // WORD_BYTES
        for name in ("request.query", "request.output_rows", "request.sampling")
    )
    sequences = []
    for number, (row, (event, drafts)) in enumerate(zip(rows.tolist(), behind.drafts, strict=True)):
        moved, behind_all = query + row * QUERY_WORDS + QUERY_POSITION, None
        if tokens > len(rows):
            moved, behind_all = output_rows + number, query + row * QUERY_WORDS
        sampled = sampling + number * SAMPLING_WORDS + SAMPLING_POSITION
        sequences.append(SequenceShift(event, drafts, moved, sampled, behind_all))
    if isinstance(tier, ShiftsInputs):
        return DraftShift(behind.ring, tuple(sequences))
    tier.wait(behind.fence)
    shift_inputs(inputs, tier.map(behind.ring), sequences)
    return None
