"""Who may wait where entries are few: whatever one tenant asks, others find an entry."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from reference.sched.wait_queue import may_wait

DEPTHS = st.integers(1, 200)


class Queue:
    """A queue of ``depth`` entries for so many tenants, to which they come until refused."""

    def __init__(self, tenants: int, depth: int) -> None:
        self.depth = depth
        self.lines = [0] * tenants

    def come(self, tenant: int) -> bool:
        """Whether one more request was taken."""
        own, waiting = self.lines[tenant], sum(self.lines)
        taken = may_wait(own, waiting, self.depth, len(self.lines))
        self.lines[tenant] += taken
        return taken

    def flood(self, tenant: int) -> int:
        """How many were taken until one was not."""
        return next(count for count in itertools.count() if not self.come(tenant))


@given(DEPTHS)
def test_one_tenant_alone_has_all_entries(depth):
    assert Queue(1, depth).flood(0) == depth


@given(DEPTHS, st.integers(2, 6))
def test_who_asks_without_end_leaves_half_of_what_is_free(depth, tenants):
    """So each that comes later finds an entry, as long as halves are whole."""
    queue = Queue(tenants, depth)
    free = depth
    for tenant in range(tenants):
        taken = queue.flood(tenant)
        assert taken == (free + 1) // 2
        free -= taken


@given(DEPTHS, st.lists(st.integers(0, 3), max_size=300))
def test_never_more_than_there_are_entries(depth, comers):
    queue = Queue(4, depth)
    taken = sum(queue.come(tenant) for tenant in comers)
    assert taken == sum(queue.lines) <= depth


def test_a_place_that_becomes_free_is_for_who_has_the_shorter_line():
    queue = Queue(2, 8)
    assert [queue.flood(0), queue.flood(1)] == [4, 2]
    queue.lines[0] -= 1
    assert [queue.come(0), queue.come(1)] == [False, True]
