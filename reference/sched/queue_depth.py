"""How many requests may wait, and how many of them may be one tenant's."""

from __future__ import annotations


def may_wait(own: int, waiting: int, depth: int, tenants: int) -> bool:
    """Whether one more request of a tenant may wait.

    ``own`` requests of it wait already, ``waiting`` requests of all ``tenants`` together, and at
    most ``depth`` may wait. With several tenants, one may not have more waiting requests than the
    queue has free entries, so an entry is always left for another (dynamic thresholds with factor
    1: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).
    """
    free = depth - waiting
    return free > 0 and (tenants == 1 or own < free)
