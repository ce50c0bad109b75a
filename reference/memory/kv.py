"""The memory of all sequences: pages they hold, pages the prefix cache keeps, recurrent states.

A page is free, held by sequences, or kept: held by nobody, but with keys and values that the
prefix cache can still find. Kept pages are the first to go when somebody needs room, those least
recently used first. Whatever becomes of a page becomes so in the order of the device's queue: a
page may be given away while steps that read it are still under way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import PAGE_TOKENS
from reference.memory.page_copies import Copies
from reference.memory.pages import PagePool
from reference.memory.prefix import Node, PathEnd, PrefixHit, PrefixStatistics, PrefixTrees
from reference.memory.reservations import Reservations
from reference.memory.state_slots import StateSlots

LEAST_COPIED_TOKENS = PAGE_TOKENS // 2
"""A page of which fewer tokens can be used is computed again rather than copied."""


class KvMemory:
    """``pages`` pages of 16 positions, shared by prefix.

    ``order`` is the order in which pages are first handed out; no order changes a result.
    ``states`` is how many recurrent states can be kept, None for a model without any: with them a
    hit ends where a state was kept. ``cache`` False shares nothing. ``cached_pages`` caps the pages
    that nobody holds and the cache keeps. With ``copies``, up to ``host_pages`` evicted pages stay
    in host memory until somebody wants them again.
    """

    def __init__(
        self,
        pages: int,
        *,
        order: Iterable[int] | None = None,
        states: int | None = None,
        cache: bool = True,
        cached_pages: int | None = None,
        copies: Copies | None = None,
        host_pages: int = 0,
    ) -> None:
        if host_pages and copies is None:
            raise ValueError("pages can be kept in host memory only with copies")
        self.total = pages
        self.statistics = PrefixStatistics()
        self._order = tuple(range(pages) if order is None else order)
        self._cache = cache
        self._most_kept = pages if cached_pages is None else cached_pages
        self._copies = copies
        self._host_pages = host_pages
        self._places = None if states is None else StateSlots(states)
        self.reservations = Reservations(pages)
        self._pool = PagePool(pages, self._order)
        self._trees = PrefixTrees()
        self._kept: OrderedDict[Node, None] = OrderedDict()
        self._spilled: OrderedDict[Node, None] = OrderedDict()

    @property
    def meta(self) -> NDArray[np.void]:
        """PAGE_META[pages]."""
        return self._pool.meta

    @property
    def free(self) -> int:
        """Pages neither held nor kept."""
        return self._pool.free

    @property
    def cached(self) -> int:
        """Pages that nobody holds and the prefix cache keeps."""
        return len(self._kept)

    @property
    def spilled(self) -> int:
        """Pages in host memory."""
        return len(self._spilled)

    def held(self, tenant: int, leaving: Sequence[tuple[int, Sequence[int]]] = ()) -> int:
        """Pages charged to the tenant now, or once ``leaving`` are released: see ``available``."""
        charged = self._pool.charged(tenant)
        return charged + self._pool.effect_of(leaving)[1][tenant] if leaving else charged

    def reserve(self, tenant: int, pages: int) -> None:
        """Guarantee the tenant so many pages. Raises ValueError when all together exceed the
        pool."""
        self.reservations.set_one(tenant, pages)

    def available(self, tenant: int, leaving: Sequence[tuple[int, Sequence[int]]] = ()) -> int:
        """Pages the tenant could take now, or once ``leaving``, (tenant, pages) each, are released.

        Shared pages come free with their last holder only, and what others have reserved is theirs
        again as soon as they hold less.
        """
        room = self.free + self.cached
        if not leaving and not self.reservations:
            return room
        freed, changes = self._pool.effect_of(leaving)
        kept = self.reservations.kept_from(tenant, lambda other: self.held(other) + changes[other])
        return max(0, room + freed - kept)

    def take(self, count: int, tenant: int, slot: int) -> list[int] | None:
        """``count`` pages for ``slot``, charged to ``tenant``; None when there are not so many."""
        if count > self.available(tenant):
            return None
        while self.free < count:
            self._evict(next(iter(self._kept)))
        return self._pool.take(count, slot, tenant)

    def match(self, scope: Hashable, tokens: NDArray[np.int32], most: int) -> int:
        """How many of the first ``most`` tokens are known in ``scope``: what ``adopt`` gives while
        there is room. ``tokens`` is int32[n]. Changes nothing."""
        path = self._usable(self._trees.find(scope, tokens, most))
        known = len(path) * PAGE_TOKENS
        return most if self._half_used(scope, path, tokens, most) else known

    def fits(
        self, scope: Hashable, tokens: NDArray[np.int32], most: int, pages: int, tenant: int
    ) -> bool:
        """Whether a sequence of ``tokens`` could have ``pages`` pages now: adopt those known of its
        first ``most`` tokens, and take the rest. Changes nothing."""
        path = self._usable(self._trees.find(scope, tokens, most))
        shared = sum(node.page is not None and node not in self._kept for node in path)
        return pages - shared <= self.available(tenant)

    def adopt(
        self, scope: Hashable, tokens: NDArray[np.int32], most: int, tenant: int, slot: int
    ) -> PrefixHit:
        """Hold the pages of the longest prefix of ``tokens`` that is known in ``scope``, of at most
        ``most`` tokens, for ``slot`` of ``tenant``."""
        known = self._trees.find(scope, tokens, most)
        path = self._usable(known, self.available(tenant))
        difference = self._trees.difference(scope, known, tokens, tenant)
        resident = [node.page for node in path if node.page is not None]
        self._pool.hold(resident, slot, tenant)
        for node in path:
            self._kept.pop(node, None)
            self._spilled.pop(node, None)
        self._restore([node for node in path if node.page is None], tenant, slot)
        pages = [node.page for node in path if node.page is not None]
        covered = len(path) * PAGE_TOKENS
        partial = self._half_used(scope, path, tokens, most)
        private = self._private_copy(partial, tenant, slot) if partial is not None else None
        if private is not None:
            pages, covered = [*pages, private], most
        state = None
        if self._places is not None and path:
            state = path[-1].state
            self._places.touch(path[-1])
        self._count(queries=1, tokens_asked=len(tokens), tokens_hit=covered)
        return PrefixHit(tuple(pages), covered, state, len(known) * PAGE_TOKENS, difference)

    def publish(
        self,
        scope: Hashable,
        tokens: NDArray[np.int32],
        pages: Sequence[int],
        end: PathEnd | None = None,
        tenant: int | None = None,
    ) -> PathEnd | None:
        """Make the whole pages of a sequence of ``tenant`` findable in ``scope``.

        ``tokens`` are those known to be in ``pages``, which the caller holds, from the first of the
        sequence on. ``end`` is what this returned for fewer tokens of the same sequence: with it
        only the pages since then are looked at. None while there is nothing to find.
        """
        whole = min(len(tokens) // PAGE_TOKENS, len(pages))
        if end is not None and not end.valid:
            end = None
        if not self._cache or whole <= (0 if end is None else end.pages):
            return end
        for number, node in self._trees.extend(scope, tokens, whole, end, tenant):
            page = pages[number]
            if node.page != page and (node.page is None or node in self._kept):
                self._replace(node, page)
        return PathEnd(node, whole)

    def release(self, pages: Sequence[int], tenant: int) -> None:
        """Drop the tenant's references to a sequence's pages, in order: what was published stays
        until somebody needs the room."""
        unheld = [(page, self._trees.of_page(page)) for page in self._pool.release(pages, tenant)]
        self._pool.give_back([page for page, node in unheld if node is None])
        nodes = [node for _, node in unheld if node is not None]
        # Of a path the far end is the first to go: a page above it serves more sequences, and
        # without it those below could not be found.
        for node in reversed(nodes):
            self._kept[node] = None
        if nodes:
            self._touch(nodes[-1])
        while len(self._kept) > self._most_kept:
            self._evict(next(iter(self._kept)))

    def save_state_slot(self, gain: int | None = None) -> int | None:
        """A slot for a recurrent state, the caller's until it attaches or drops it; None when there
        is none: see ``StateSlots.take``."""
        return self._places.take(gain) if self._places is not None and self._cache else None

    def attach_state(self, scope: Hashable, tokens: NDArray[np.int32], place: int) -> None:
        """Let ``place`` hold the state after exactly ``tokens``, whole pages that were published.

        Where they are not known any more, or have a state, the place is free again.
        """
        assert self._places is not None, "the model has no recurrent states"
        path = self._trees.find(scope, tokens, len(tokens))
        if path and len(path) * PAGE_TOKENS == len(tokens) and path[-1].state is None:
            self._places.attach(path[-1], place, len(tokens))
        else:
            self._places.drop(place)

    def drop_state_slot(self, place: int) -> None:
        """Give an unattached place back."""
        assert self._places is not None, "the model has no recurrent states"
        self._places.drop(place)

    def forget_others(self, scopes: Collection[Hashable], tenants: Collection[int]) -> None:
        """Forget what is cached in all but these scopes, of which nobody holds a page, and what
        belonged to all but these ``tenants``."""
        self._trees.forget_tenants(tenants)
        for scope in [scope for scope, _ in self._trees.scopes() if scope not in scopes]:
            for node in self._trees.below(scope):
                self._drop(node)

    def clear(self) -> None:
        """Forget everything but reservations and statistics: nothing is held, nothing is known."""
        self._trees = PrefixTrees()
        self._pool = PagePool(self.total, self._order)
        self._kept.clear()
        self._spilled.clear()
        if self._places is not None:
            self._places = StateSlots(self._places.count)

    def check(
        self,
        holders: Iterable[tuple[int, Sequence[int]]] | None = None,
        scope_of: Callable[[int], Hashable] | None = None,
    ) -> None:
        """Raise AssertionError when an invariant is broken.

        Every page is free, held or kept; a page is charged to one that holds it; what the cache can
        find is where it says. ``holders``, (tenant, pages) of every sequence, are compared with the
        references, one for one. ``scope_of`` tells a tenant's scope: nobody holds a page of another
        scope.
        """
        self._pool.check()
        expected: dict[int, list[int]] = {}
        for tenant, pages in holders or ():
            for page in pages:
                expected.setdefault(page, []).append(tenant)
        held = 0
        for page in range(self.total):
            tenants = self._pool.holders(page)
            held += bool(tenants)
            if holders is not None:
                assert sorted(tenants) == sorted(expected.get(page, [])), (
                    f"page {page} counts the holders {tenants}, not {expected.get(page, [])}"
                )
        assert self.free + held + self.cached == self.total, (
            f"{self.free} free, {held} held and {self.cached} kept pages of {self.total}"
        )
        self._check_trees(scope_of)

    def _check_trees(self, scope_of: Callable[[int], Hashable] | None) -> None:
        kept, spilled, stateful = set(), set(), set()
        for scope, node in self._trees.check():
            if node.state is not None:
                stateful.add(node)
            if node.page is None:
                spilled.add(node)
                continue
            holders = self._pool.holders(node.page)
            if not holders:
                kept.add(node)
            strangers = [t for t in holders if scope_of is not None and scope_of(t) != scope]
            assert not strangers, f"tenants {strangers} hold a page of {scope}"
        assert kept == self._kept.keys(), "the pages kept are not those nobody holds"
        assert spilled == self._spilled.keys(), "the pages in host memory are others"
        assert len(spilled) <= self._host_pages
        assert len(kept) <= self._most_kept
        if self._places is not None:
            self._places.check(stateful)

    def _usable(self, path: list[Node], room: int | None = None) -> list[Node]:
        """The part of a path that can be adopted: within ``room`` pages, up to a state where the
        model needs one."""
        end = 0
        for length, node in enumerate(path, 1):
            if room is not None and (node.page is None or node in self._kept):
                room -= 1
                if room < 0:
                    break
            if self._places is None or node.state is not None:
                end = length
        return path[:end]

    def _half_used(
        self, scope: Hashable, path: list[Node], tokens: NDArray[np.int32], most: int
    ) -> Node | None:
        """The node after ``path``, where it is known but ``most`` ends within its page."""
        useful = most - len(path) * PAGE_TOKENS
        copies = self._copies is not None and self._places is None
        if not copies or not LEAST_COPIED_TOKENS <= useful < PAGE_TOKENS:
            return None
        return self._trees.child(scope, path, tokens)

    def _restore(self, nodes: list[Node], tenant: int, slot: int) -> None:
        """Bring pages back from host memory."""
        pages = self.take(len(nodes), tenant, slot)
        assert pages is not None, "there was room"
        for node, page in zip(nodes, pages, strict=True):
            assert self._copies is not None
            self._copies.load(node.saved, page)
            node.saved = None
            self._trees.place(node, page)
            self._pool.mark_whole(page)
        self._count(restored=len(nodes))

    def _private_copy(self, node: Node, tenant: int, slot: int) -> int | None:
        """A page of the sequence's own with what is in the node's, None when there is no room."""
        assert self._copies is not None
        source, saved = node.page, node.saved
        if source is not None:
            # Held while room is made, so that it does not make room itself.
            self._pool.hold([source], slot, tenant)
            self._kept.pop(node, None)
        pages = self.take(1, tenant, slot)
        if pages is not None and source is not None:
            self._copies.copy(source, pages[0])
        elif pages is not None:
            self._copies.load(saved, pages[0])
        if source is not None:
            self.release([source], tenant)
        if pages is None:
            return None
        self._count(copied=1)
        return pages[0]

    def _replace(self, node: Node, page: int) -> None:
        """Let a node that nobody holds have its tokens in ``page``, which somebody holds."""
        old = node.page
        self._kept.pop(node, None)
        self._spilled.pop(node, None)
        node.saved = None
        self._trees.place(node, page)
        self._pool.mark_whole(page)
        if old is not None:
            self._pool.give_back([old])

    def _touch(self, node: Node) -> None:
        """Let the node and what it builds on be used more recently than anything else."""
        for used in node.upward():
            for recency in (self._kept, self._spilled):
                if used in recency:
                    recency.move_to_end(used)

    def _evict(self, node: Node) -> None:
        """Free the page of a node that nobody holds, and where it is not kept in host memory, those
        of the nodes below it: they could not be found any more."""
        if not self._host_pages:
            self._drop(node)
            return
        while len(self._spilled) >= self._host_pages:
            self._drop(next(iter(self._spilled)))
        # What made room there may have been above the node.
        if node.parent is not None:
            self._spill(node)

    def _spill(self, node: Node) -> None:
        """Move a page to host memory."""
        assert self._copies is not None
        page = node.page
        assert page is not None
        node.saved = self._copies.save(page)
        self._trees.place(node, None)
        del self._kept[node]
        self._spilled[node] = None
        self._pool.give_back([page])
        self._count(evicted=1, spilled=1)

    def _drop(self, node: Node) -> None:
        for gone in self._trees.drop(node):
            if gone in self._kept:
                del self._kept[gone]
                assert gone.page is not None
                self._pool.give_back([gone.page])
                self._count(evicted=1)
            self._spilled.pop(gone, None)
            if self._places is not None:
                self._places.forget(gone)

    def _count(self, **changes: int) -> None:
        counted = {name: getattr(self.statistics, name) + by for name, by in changes.items()}
        self.statistics = replace(self.statistics, **counted)
