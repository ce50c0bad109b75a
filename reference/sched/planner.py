"""Which tokens the next step computes: a pure function of the sequences and the limits.

Decode tokens come first and are never delayed by prefill; prefill fills what is left of the
step's token budget, oldest sequence first. The order of a step's tokens changes no bit of any
sequence, so this is policy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pending:
    """A sequence holding a slot: ``length`` tokens known, the first ``computed`` in the cache."""

    slot: int
    computed: int
    length: int

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return self.length - self.computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute positions ``start .. start + count - 1`` of a slot in this step."""

    slot: int
    start: int
    count: int


def plan_step(pending: Sequence[Pending], chunk_tokens: int) -> tuple[Chunk, ...]:
    """The chunks of one step. ``chunk_tokens`` caps the prefill tokens of a step.

    Every sequence with one token left (decode) is in the step; no step is empty while work is
    pending. ``pending`` is in order of age.
    """
    if chunk_tokens < 1:
        raise ValueError("a step computes at least one token")
    decode = [Chunk(p.slot, p.computed, 1) for p in pending if p.remaining == 1]
    budget = chunk_tokens
    prefill = []
    for sequence in pending:
        if sequence.remaining > 1 and budget > 0:
            count = min(sequence.remaining, budget)
            prefill.append(Chunk(sequence.slot, sequence.computed, count))
            budget -= count
    return (*decode, *prefill)
