"""Choose the tokens that the next step computes: pure functions of the running sequences, of the
limits and of the cost of steps.

Decode tokens come first and are never delayed by prefill; prefill fills what is left of the
step's token budget, oldest sequence first. The order of a step's tokens changes no bit of any
sequence, so this is policy only.

``prefill_tokens`` is the budget of prefill. A sequence in prefill gets one token per step, as if it
decoded already; these tokens are pooled for the oldest one. So a step takes about as long as one in
which all running sequences decode, however many are in prefill. More prefill tokens are added if
they cost nothing. If a token is cheap compared with the fixed cost of a step, this would allow
hardly any prefill; then a step may take ``ratio`` times as long as its decoding alone.

Whether in few steps or in many, a prompt delays the decoding sequences by the same time in all.
But all that wait for it are delayed by the decoding of each step. So it is spread over several
steps only for the sake of a class above its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from reference.sched.cost import Load, StepCost


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


FIRST_PREFILL_TOKENS = 64
"""Prefill tokens of a step that also decodes, until costs are known."""
SPREAD_STEPS = 4
"""The pending prefill is spread over this many steps if the ratio allows: a prompt computed in a
single step would make this step long."""
SPREAD_SHARE = 1 / 3
"""Prefill may always take this part of the extra time that the ratio allows."""


def prefill_tokens(
    pending: Sequence[Pending], cost: StepCost, ratio: float, limit: int, *, spread: bool = True
) -> int:
    """Prefill tokens of the next step, 1 to ``limit``, which is at least 1.

    ``pending`` are the running sequences, oldest first. The result is ``limit`` if no sequence
    decodes or ``ratio`` is infinite. Prefill is spread over SPREAD_STEPS steps unless ``spread`` is
    false: then it takes all that ``ratio`` allows."""
    decoding, prefilling = split_by_phase(pending)
    if not decoding or not prefilling or ratio == math.inf:
        return limit
    load = Load(remaining_tokens(decoding), _attended(decoding))
    left = remaining_tokens(prefilling)
    share, start, limit = min(len(prefilling), limit), prefilling[0].computed, min(left, limit)
    pooled = Load(load.tokens + share, load.attended + share * (start + share))
    alone, level = cost.predict(load), cost.predict(pooled)
    if alone is None or level is None:
        return min(limit, FIRST_PREFILL_TOKENS)

    def within(allowed: float) -> int:
        seconds = max(level, allowed * alone)
        return cost.tokens_within(seconds, load, limit, start=start, cautious=spread)

    if not spread:
        return max(share, within(ratio))
    even = math.ceil(left / SPREAD_STEPS)
    least = within(1 + SPREAD_SHARE * (ratio - 1))
    return max(share, least if even <= least else min(even, within(ratio)))


def _attended(decoding: Sequence[Pending]) -> int:
    """Positions that the decoding sequences and their drafts attend to."""
    return sum([(length - computed) * length for _, computed, length, _ in decoding])
