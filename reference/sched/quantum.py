"""How far a request has to come in a slot before it can lose it again.

What is computed of a request may be lost with its slot: its pages are evicted while it waits. So a
request that waited too long gets on beyond all it ever had, and by as many positions as it has to
compute again at least. Then every turn brings it nearer to its end, in a number of turns that is
known, and no more is computed twice than once.
"""

from __future__ import annotations

from contract.arithmetic import PAGE_TOKENS

QUANTUM = 64
"""Fewest new positions of a turn."""
QUANTUM_PART = 8
"""And at least one in so many of those it had: the turns of a long request grow with it."""


def goal(reached: int, begun: int, end: int) -> int:
    """How many positions, of ``end``, a request keeps a slot for in which it begins with ``begun``
    positions, when it had ``reached`` before: a whole number of pages, since what is kept of a
    recurrent model is kept there. One more than all means until it has ended."""
    had = max(reached, begun)
    least = had + max(QUANTUM, had // QUANTUM_PART, had - begun)
    return min(-(-least // PAGE_TOKENS) * PAGE_TOKENS, end + 1)


def most_turns(end: int) -> int:
    """How often a request of ``end`` positions is admitted after having waited too long, at most,
    whatever is lost of it between two turns. Of each turn the tokens of steps under way may be
    lost, less than a page."""
    turns, had = 0, 0
    while had < end:
        had += max(QUANTUM, had // QUANTUM_PART) - PAGE_TOKENS
        turns += 1
    return turns
