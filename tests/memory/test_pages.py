"""The page pool: every page has one owner or none, and none is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contract.records import NO_SLOT
from reference.limits import pages_for
from reference.memory.pages import PagePool

PAGES = 12


class PoolMachine(RuleBasedStateMachine):
    """Any order of taking and giving back, against a dictionary of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.owned: dict[int, list[int]] = {}
        self.next_slot = 0

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.free))
        self.owned[self.next_slot] = self.pool.take(count, self.next_slot, tenant=7)
        self.next_slot += 1

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.owned)))
        left = self.pool.release(self.owned[slot], tenant=7)
        assert left == self.owned.pop(slot)
        self.pool.give_back(left)

    @invariant()
    def every_page_has_one_owner_or_none(self) -> None:
        held = [page for pages in self.owned.values() for page in pages]
        assert len(held) == len(set(held))
        assert self.pool.free + len(held) == PAGES
        for slot, pages in self.owned.items():
            assert (self.pool.meta["owner_slot"][pages] == slot).all()
        free = sorted(set(range(PAGES)) - set(held))
        assert (self.pool.meta["owner_slot"][free] == NO_SLOT).all()
        assert (self.pool.meta["ref_count"][free] == 0).all()


TestPool = PoolMachine.TestCase


@given(st.integers(0, 10_000))
def test_pages_for_holds_exactly_enough(tokens: int) -> None:
    pages = pages_for(tokens)
    assert pages * 16 >= tokens > (pages - 1) * 16


def test_a_page_cannot_be_given_back_twice() -> None:
    pool = PagePool(2)
    pages = pool.take(1, slot=0)
    with pytest.raises(AssertionError, match="is held"):
        pool.give_back(pages)
    with pytest.raises(AssertionError, match="not owned by tenant 1"):
        pool.release(pages, tenant=1)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(pages * 2)
    pool.give_back(pool.release(pages))
    with pytest.raises(AssertionError, match="not owned"):
        pool.release(pages)
    pool.check()


def test_the_charge_of_a_shared_page_moves_when_its_payer_leaves() -> None:
    pool = PagePool(2)
    pages = pool.take(1, slot=0, tenant=1)
    pool.hold(pages, slot=1, tenant=1)
    pool.hold(pages, slot=2, tenant=2)
    assert (pool.charged(1), pool.charged(2), pool.references(pages[0])) == (1, 0, 3)
    assert pool.release(pages, tenant=1) == []
    assert (pool.charged(1), pool.charged(2)) == (1, 0)
    assert pool.release(pages, tenant=1) == []
    assert (pool.charged(1), pool.charged(2)) == (0, 1)
    assert pool.holders(pages[0]) == [2]
    assert pool.release(pages, tenant=2) == pages
    assert (pool.charged(2), pool.free) == (0, 1)
    pool.hold(pages, slot=3, tenant=5)
    assert pool.meta[pages[0]].tolist() == (1, 3, 5, 0)
    pool.check()


def test_more_pages_than_free_is_a_broken_caller() -> None:
    with pytest.raises(AssertionError, match="3 pages asked of 2"):
        PagePool(2).take(3, slot=0)


def test_the_order_of_first_use_is_the_callers() -> None:
    assert PagePool(3, order=[2, 0, 1]).take(3, slot=0) == [2, 0, 1]
    with pytest.raises(ValueError, match="every page once"):
        PagePool(3, order=[0, 0, 1])
