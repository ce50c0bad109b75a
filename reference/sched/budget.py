"""Number of prefill tokens of the next step: a pure function of the running sequences and of what
steps cost.

Each sequence that still reads its prompt counts as one token, as if it decoded already; the tokens
are pooled for the oldest. So a step takes about as long as one in which all running sequences
decode, however many of them still read. More prompt tokens are added where they cost nothing. Where
a token costs little compared with the fixed cost of a step, this would be hardly any prefill; there
a step may take ``ratio`` times as long as its decoding alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reference.sched.cost import Load, StepCost
from reference.sched.planner import Pending, remaining_tokens, split_by_phase

FIRST_PREFILL_TOKENS = 64
"""Prompt tokens of a step that also decodes, while costs are not known yet."""
SPREAD_STEPS = 4
"""The waiting prefill is divided among so many steps, as far as the ratio allows: a prompt that is
read in a single step makes this one step long."""
SPREAD_SHARE = 1 / 3
"""The part of the time above decoding, which a ratio allows, that prefill always may take."""


def prefill_tokens(
    pending: Sequence[Pending], cost: StepCost, ratio: float | None, most: int
) -> int:
    """Prompt tokens of the next step, 1 to ``most``, which is at least 1.

    ``pending`` are the running sequences, in order of age. It is ``most`` where no sequence decodes
    or no ``ratio`` bounds the step."""
    decoding, prefilling = split_by_phase(pending)
    if not decoding or not prefilling or ratio is None:
        return most
    load = Load(remaining_tokens(decoding), _attended(decoding))
    left = remaining_tokens(prefilling)
    share, start, most = min(len(prefilling), most), prefilling[0].computed, min(left, most)
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
    """Positions that the decoding sequences attend to, with their drafted tokens."""
    return sum([(length - computed) * length for _, computed, length, _ in decoding])
