"""How many may wait: places of the queue, and what one tenant may take of them."""

from __future__ import annotations


def may_wait(own: int, waiting: int, depth: int, tenants: int) -> bool:
    """Whether one more request of a tenant may wait.

    ``own`` requests of it wait already, ``waiting`` of all ``tenants`` together, and ``depth`` may.
    Where there are several tenants, the line of one may not be longer than the places that are
    free, so that whatever one asks, a place is left for another (dynamic thresholds with factor 1:
    Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
    """
    free = depth - waiting
    return free > 0 and (tenants == 1 or own < free)
