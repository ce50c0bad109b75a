"""How much prefill the next step carries: a pure function of who runs and of what steps cost.

Each sequence that still reads its prompt gets a token as if it decoded already; these are pooled
for the oldest. So a step takes about as long whoever reads and whoever decodes: as long as one in
which all that run decode, which is the interval they are heading for. What more costs nothing is
taken too. Where tokens cost little beside what a step costs in any case, that would be hardly any
prefill; there a step may take ``ratio`` times as long as its decoding alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from reference.sched.cost import Load, StepCost
from reference.sched.planner import Pending, divided, left_of

FIRST_PREFILL_TOKENS = 64
"""Prefill beside decoding sequences while costs are not known yet."""
SPREAD_STEPS = 4
"""Steps among which what is to be read is divided, as far as the level and the ratio allow: a
prompt that a single step could read would make that one step long."""
SPREAD_SHARE = 1 / 3
"""Of what a ratio allows above decoding, what prefill may take however little there is to read."""


def prefill_tokens(
    pending: Sequence[Pending], cost: StepCost, ratio: float | None, most: int
) -> int:
    """Prefill tokens of the next step, 1 to ``most``, which is at least 1.

    ``pending`` are the sequences that run, in order of age. Without a decoding sequence or a
    ``ratio`` nobody waits, and it is ``most``.
    """
    decoding, reading = divided(pending)
    if not decoding or not reading or ratio is None:
        return most
    load = Load(left_of(decoding), _attended(decoding))
    left = left_of(reading)
    share, start, most = min(len(reading), most), reading[0].computed, min(left, most)
    pooled = Load(load.tokens + share, load.attended + share * (start + share))
    alone, level = cost.predict(load), cost.predict(pooled)
    if alone is None or level is None:
        return min(most, FIRST_PREFILL_TOKENS)

    def within(allowed: float) -> int:
        return cost.tokens_within(max(level, allowed * alone), load, most, start=start)

    even = math.ceil(left / SPREAD_STEPS)
    least = within(1 + SPREAD_SHARE * (ratio - 1))
    return max(share, least if even <= least else min(even, within(ratio)))


def _attended(decoding: Sequence[Pending]) -> int:
    """Positions attended to by those that decode, the guesses they have among them."""
    return sum([(length - computed) * length for _, computed, length, _ in decoding])
