"""Choose the tokens that the next step computes: a pure function of the sequences and the limits.

Decode tokens come first and are never delayed by prefill; prefill fills what is left of the
step's token budget, oldest sequence first. The order of a step's tokens changes no bit of any
sequence, so this is policy only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Pending(NamedTuple):
    """A sequence in a slot: its first ``length`` tokens can be computed, the first ``computed``
    have been. The last ``draft`` of them are drafted. It decodes if only one token and its drafts
    are left."""

    slot: int
    computed: int
    length: int
    draft: int = 0


def split_by_phase(pending: Iterable[Pending]) -> tuple[list[Pending], list[Pending]]:
    """The sequences that decode, and those in prefill."""
    decoding: list[Pending] = []
    prefilling: list[Pending] = []
    for one in pending:
        _, computed, length, draft = one
        if length - computed == draft + 1:
            decoding.append(one)
        elif length > computed:
            prefilling.append(one)
    return decoding, prefilling


def remaining_tokens(pending: Iterable[Pending]) -> int:
    """Tokens that can be computed now."""
    return sum([length - computed for _, computed, length, _ in pending])


class Chunk(NamedTuple):
    """Compute positions ``start .. start + tokens - 1`` of a slot in this step."""

    slot: int
    start: int
    tokens: int


def plan_step(pending: Iterable[Pending], chunk_tokens: int) -> list[Chunk]:
    """The chunks of one step, with at most ``chunk_tokens`` prefill tokens.

    ``pending`` is oldest first. Every decoding sequence is in the step; no step is empty while
    there is something to compute."""
    if chunk_tokens < 1:
        raise ValueError("a step computes at least one token")
    decodes: list[Chunk] = []
    prefills: list[Chunk] = []
    for slot, computed, length, draft in pending:
        left = length - computed
        if left == draft + 1:
            decodes.append(Chunk(slot, computed, left))
        elif left > 0 and chunk_tokens:
            count = min(left, chunk_tokens)
            chunk_tokens -= count
            prefills.append(Chunk(slot, computed, count))
    return decodes + prefills
