"""Checks that the prefix cache's trees, its pages, their holders and its saved states agree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence, Set

from reference.memory.pages import PagePool
from reference.memory.prefix import Node, PrefixTrees, sharers
from reference.memory.state_slots import StateSlots


def check_trees(
    trees: PrefixTrees,
    pool: PagePool,
    states: StateSlots | None,
    cached: Set[Node],
    spilled: Set[Node],
    scope_of: Callable[[int], Hashable] | None,
) -> None:
    """Raise AssertionError unless ``cached`` are the nodes whose pages nobody holds and ``spilled``
    those in host memory, and no tenant holds a page outside the scope that ``scope_of`` gives."""
    unheld, absent, stateful = set(), set(), set()
    for scope, node in trees.check():
        if node.state is not None:
            stateful.add(node)
        if node.page is None:
            absent.add(node)
            continue
        holders = pool.holders(node.page)
        if not holders:
            unheld.add(node)
        strangers = [t for t in holders if scope_of is not None and scope_of(t) != sharers(scope)]
        assert not strangers, f"tenants {strangers} hold a page of {scope}"
    assert unheld == cached, "the cached pages are not those without holders"
    assert absent == spilled, "the pages in host memory are others"
    if states is not None:
        states.check(stateful)


def check_holders(
    pool: PagePool, pages: int, holders: Iterable[tuple[int, Sequence[int]]] | None
) -> int:
    """Return how many of ``pages`` pages are held. Raises AssertionError unless ``holders``,
    (tenant, pages) of every sequence, match the references of the pages."""
    expected: dict[int, list[int]] = {}
    for tenant, own in holders or ():
        for page in own:
            expected.setdefault(page, []).append(tenant)
    held = 0
    for page in range(pages):
        tenants = pool.holders(page)
        held += bool(tenants)
        if holders is not None:
            assert sorted(tenants) == sorted(expected.get(page, [])), (
                f"page {page} counts the holders {tenants}, not {expected.get(page, [])}"
            )
    return held
