"""The number of positions that an aged request computes before it can lose its slot again.

A request that loses its slot may lose its pages to eviction and then computes them again. So a
request that has waited too long keeps its slot until it has computed more positions than ever
before, by at least as many as it had to recompute. Every turn then brings it nearer to its end, the
number of turns is bounded, and at most half of all computed positions are recomputed."""

from __future__ import annotations

from contract.arithmetic import PAGE_TOKENS

QUANTUM = 64
"""The fewest new positions of a turn."""
QUANTUM_PART = 8
"""A turn also has at least one new position for each this many earlier ones: the turns of a long
request grow with it."""


def end_of_quantum(reached: int, begun: int, end: int) -> int:
    """The number of positions until which a request of ``end`` positions keeps its slot. It starts
    with ``begun`` cached positions and has once had ``reached``. The result is a whole number of
    pages, since recurrent states are saved there; ``end`` + 1 means until the request ends."""
    had = max(reached, begun)
    least = had + max(QUANTUM, had // QUANTUM_PART, had - begun)
    return min(-(-least // PAGE_TOKENS) * PAGE_TOKENS, end + 1)


def max_turns(end: int) -> int:
    """The most admissions as an aged request that a request of ``end`` positions needs, if all its
    pages are evicted between turns. Each turn may lose the tokens of steps in flight, which are
    less than a page."""
    turns, had = 0, 0
    while had < end:
        had += max(QUANTUM, had // QUANTUM_PART) - PAGE_TOKENS
        turns += 1
    return turns
