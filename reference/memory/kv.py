"""The memory of all sequences: KV pages, the prefix cache, and saved recurrent states.

A page is free, held by sequences, or cached: then no sequence holds it, but it can be found by its
tokens. If pages are needed, the least recently used cached pages are evicted. All copies and steps
run in the order of the device's queue, so a page can get another holder while steps that read it
are still in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import PAGE_TOKENS
from reference.memory.cached_pages import CachedPages
from reference.memory.kv_check import check_holders, check_trees
from reference.memory.page_copies import Copies
from reference.memory.pages import PagePool, Reservations
from reference.memory.prefix import (
    NO_TREE_OBSERVER,
    Node,
    PrefixHit,
    PrefixStatistics,
    PrefixTrees,
    PublishedPrefix,
    TreeObserver,
    sharers,
)
from reference.memory.state_slots import StateSlots

MIN_COPIED_TOKENS = PAGE_TOKENS // 2
"""If fewer tokens of a cached page can be used, they are computed again, not copied."""


class KvMemory:
    """``pages`` pages of 16 positions, shared by sequences with equal prefixes.

    - ``order`` is the order in which pages are first handed out; it changes no result.
    - ``states`` is the number of state slots, None for a model without recurrent layers. With them
      a hit ends where a state was saved.
    - Without ``cache`` nothing is shared. ``cached_pages`` is the most cached pages.
    - With ``copies``, up to ``host_pages`` evicted pages are saved in host memory.
    - ``observer`` is notified of every change of the cache."""

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
        observer: TreeObserver = NO_TREE_OBSERVER,
    ) -> None:
        if host_pages and copies is None:
            raise ValueError("pages can be saved in host memory only with copies")
        self._counts = Counter[str]()
        self._order = tuple(range(pages) if order is None else order)
        self._cache = cache
        self._max_cached = pages if cached_pages is None else cached_pages
        self._host_pages = host_pages
        self._observer = observer
        self._states = states
        self.reservations = Reservations(pages)
        self.resize(pages, copies)

    @property
    def statistics(self) -> PrefixStatistics:
        """The counts so far."""
        return PrefixStatistics(**self._counts)

    @property
    def meta(self) -> NDArray[np.void]:
        """PAGE_META[pages]."""
        return self._pool.meta

    @property
    def free(self) -> int:
        """Pages that are neither held nor cached."""
        return self._pool.free

    @property
    def cached(self) -> int:
        """Pages that no sequence holds and the prefix cache can find."""
        return len(self._cached.on_device)

    def held(self, tenant: int, leaving: Sequence[tuple[int, Sequence[int]]] = ()) -> int:
        """Pages charged to the tenant now, or after ``leaving`` was released: see ``available``."""
        charged = self._pool.charged(tenant)
        return charged + self._pool.effect_of(leaving)[1][tenant] if leaving else charged

    def available(self, tenant: int, leaving: Sequence[tuple[int, Sequence[int]]] = ()) -> int:
        """Pages that the tenant can take now, or after ``leaving``, (tenant, pages) each, was
        released.

        A shared page becomes free with its last holder only. Reserved pages that a tenant releases
        are available to this tenant only."""
        room = self.free + self.cached
        if not leaving and not self.reservations:
            return room
        freed, changes = self._pool.effect_of(leaving)
        withheld = self.reservations.reserved_for_others(
            tenant, lambda other: self.held(other) + changes[other]
        )
        return max(0, room + freed - withheld)

    def take(self, count: int, tenant: int, slot: int) -> list[int] | None:
        """Take ``count`` pages for ``slot``, charged to ``tenant``; None if there are too few."""
        if count > self.available(tenant):
            return None
        while self.free < count:
            self._cached.evict()
        return self._pool.take(count, slot, tenant)

    def path(self, scope: Hashable, tokens: NDArray[np.int32], limit: int) -> list[Node]:
        """The pages of the longest prefix, of at most ``limit`` tokens, that a sequence can use."""
        return self._usable(self._trees.find(scope, tokens, limit))

    def match(self, scope: Hashable, tokens: NDArray[np.int32], limit: int) -> int:
        """The number of the first ``limit`` tokens that are cached in ``scope``: what ``adopt``
        finds if there is room. ``tokens`` is int32[n]. Changes nothing."""
        path = self.path(scope, tokens, limit)
        return limit if self._partial_match(scope, path, tokens, limit) else len(path) * PAGE_TOKENS

    def adopt(
        self,
        scope: Hashable,
        tokens: NDArray[np.int32],
        limit: int,
        tenant: int,
        slot: int,
        needed: int = 0,
    ) -> PrefixHit | None:
        """Hold the pages of the longest cached prefix of ``tokens`` in ``scope``, of at most
        ``limit`` tokens, for ``slot`` of ``tenant``. None, with nothing changed, if the sequence
        could not get ``needed`` pages in all: pages of the prefix that others hold, and available
        pages."""
        known, room = self._trees.find(scope, tokens, limit), self.available(tenant)
        path = self._usable(known, room)
        held = sum([node.page is not None and node not in self._cached.on_device for node in path])
        if needed - held > room:
            return None
        difference = self._trees.difference(scope, known, tokens, tenant)
        resident = [node.page for node in path if node.page is not None]
        self._pool.hold(resident, slot, tenant)
        for node in path:
            self._cached.remove(node)
        if len(resident) < len(path):
            absent = [node for node in path if node.page is None]
            loaded = self.take(len(absent), tenant, slot)
            assert loaded is not None, "there was room"
            self._cached.restore(absent, loaded)
        pages = [node.page for node in path if node.page is not None]
        covered = len(path) * PAGE_TOKENS
        partial = self._partial_match(scope, path, tokens, limit)
        private = self._copy_for_slot(partial, tenant, slot) if partial is not None else None
        if private is not None:
            pages, covered = [*pages, private], limit
        state = None
        if self._state_slots is not None and path:
            state = path[-1].state
            self._state_slots.touch(path[-1])
        self._counts.update(queries=1, tokens_asked=len(tokens), tokens_hit=covered)
        return PrefixHit(tuple(pages), covered, state, len(known) * PAGE_TOKENS, difference)

    def publish(
        self,
        scope: Hashable,
        tokens: NDArray[np.int32],
        pages: Sequence[int],
        end: PublishedPrefix | None = None,
        tenant: int | None = None,
    ) -> PublishedPrefix | None:
        """Let sequences of ``scope`` find the full pages of a sequence of ``tenant``.

        ``tokens`` are the first tokens of the sequence, stored in ``pages``, which the caller
        holds. ``end`` is the result of an earlier call for fewer tokens of the same sequence: only
        later pages are published. None while no page is full."""
        whole = min(len(tokens) // PAGE_TOKENS, len(pages))
        if end is not None and not end.valid:
            end = None
        if not self._cache or whole <= (0 if end is None else end.pages):
            return end
        for number, node in self._trees.extend(scope, tokens, whole, end, tenant):
            page = pages[number]
            if node.page != page and (node.page is None or node in self._cached.on_device):
                self._replace(node, page)
        return PublishedPrefix(node, whole)

    def unpublish(
        self, scope: Hashable, tokens: NDArray[np.int32], pages: Sequence[int], first: int
    ) -> None:
        """Let nobody find ``pages[first:]``, which ``publish`` was given, or states after them."""
        for node in self._trees.find(scope, tokens, len(tokens))[first:]:
            if self._state_slots is not None:
                self._state_slots.forget(node)
            if node.page in pages and node.parent is not None:
                self._cached.drop(node)

    def release(self, pages: Sequence[int], tenant: int) -> None:
        """Drop the tenant's references to a sequence's pages, given in order. Published pages stay
        cached until they are evicted."""
        unheld = [(page, self._trees.of_page(page)) for page in self._pool.release(pages, tenant)]
        self._pool.give_back([page for page, node in unheld if node is None])
        nodes = [node for _, node in unheld if node is not None]
        # The end of a path is evicted first: a page above it serves more sequences, and those below
        # are found only through it.
        cached = self._cached
        for node in reversed(nodes):
            cached.on_device[node] = None
        if nodes:
            cached.touch(nodes[-1])
        while len(cached.on_device) > self._max_cached:
            cached.evict()

    def save_state_slot(self, gain: int | None = None) -> int | None:
        """A state slot for a recurrent state, which the caller must attach or drop; None if there
        is none: see ``StateSlots.take``."""
        slots = self._state_slots
        return slots.take(gain) if slots is not None and self._cache else None

    def attach_state(self, scope: Hashable, tokens: NDArray[np.int32], state_slot: int) -> None:
        """Let others find in ``state_slot`` the state after exactly ``tokens``, whole published
        pages.

        If these pages are no longer cached, or have a state, the state slot becomes free."""
        assert self._state_slots is not None, "the model has no recurrent states"
        path = self._trees.find(scope, tokens, len(tokens))
        if path and len(path) * PAGE_TOKENS == len(tokens) and path[-1].state is None:
            self._state_slots.attach(path[-1], state_slot, len(tokens))
        else:
            self._state_slots.drop(state_slot)

    def drop_state_slot(self, state_slot: int) -> None:
        """Free a state slot that was not attached."""
        assert self._state_slots is not None, "the model has no recurrent states"
        self._state_slots.drop(state_slot)

    def forget_others(self, scopes: Collection[Hashable], tenants: Collection[int]) -> None:
        """Drop the cached pages of all scopes but ``scopes`` that no sequence holds, and the
        ownership of all tenants but ``tenants``."""
        self._trees.forget_tenants(tenants)
        for scope in [scope for scope, _ in self._trees.scopes() if sharers(scope) not in scopes]:
            for node in self._trees.below(scope):
                self._cached.drop(node)

    def forget(self, scope: Hashable, tokens: NDArray[np.int32], tenant: int) -> list[Node]:
        """Drop the last cached pages of ``tokens``, except those that sequences hold or other
        prompts, of this tenant or another, begin with. Returns the nodes of these pages, last
        first."""
        dropped: list[Node] = []
        for node in reversed(self._trees.find(scope, tokens, len(tokens))):
            held = node not in self._cached.on_device and node not in self._cached.in_host
            if node.children or held or not node.tenants <= {tenant}:
                break
            dropped.append(node)
            self._cached.drop(node)
        return dropped

    def resize(self, pages: int, copies: Copies | None) -> None:
        """``clear``, and have ``pages`` pages from now on, at most the initial number. Reservations
        stay: tenants wait for reserved pages that do not exist."""
        self.total, self._copies = pages, copies
        self.clear()

    def clear(self) -> None:
        """Forget everything except reservations and statistics: no page is held or cached."""
        self._trees = PrefixTrees(self._observer)
        self._pool = PagePool(self.total, [page for page in self._order if page < self.total])
        states = self._states
        self._state_slots = None if states is None else StateSlots(states, self._observer)
        parts = self._trees, self._pool, self._state_slots
        self._cached = CachedPages(*parts, self._copies, self._host_pages, self._counts)

    def check(
        self,
        holders: Iterable[tuple[int, Sequence[int]]] | None = None,
        scope_of: Callable[[int], Hashable] | None = None,
    ) -> None:
        """Raise AssertionError if an invariant is broken.

        Every page is free, held or cached, and charged to a tenant that holds it. The tree of the
        cache and the pages agree. ``holders``, (tenant, pages) of every sequence, are compared with
        the references. ``scope_of`` gives a tenant's scope: no tenant holds a page of another
        scope."""
        self._pool.check()
        held = check_holders(self._pool, self.total, holders)
        pages = self.free, held, self.cached
        assert sum(pages) == self.total, f"free, held, cached are {pages} pages of {self.total}"
        cached, spilled = self._cached.on_device.keys(), self._cached.in_host.keys()
        check_trees(self._trees, self._pool, self._state_slots, cached, spilled, scope_of)
        assert len(spilled) <= self._host_pages
        assert len(cached) <= self._max_cached

    def _usable(self, path: list[Node], room: int | None = None) -> list[Node]:
        """The part of a path that can be used: within ``room`` pages, and up to a saved state if
        the model has recurrent layers."""
        end = 0
        for length, node in enumerate(path, 1):
            if room is not None and (node.page is None or node in self._cached.on_device):
                room -= 1
                if room < 0:
                    break
            if self._state_slots is None or node.state is not None:
                end = length
        return path[:end]

    def _partial_match(
        self, scope: Hashable, path: list[Node], tokens: NDArray[np.int32], limit: int
    ) -> Node | None:
        """The node after ``path``, if its page is cached and ``limit`` ends inside it."""
        useful = limit - len(path) * PAGE_TOKENS
        copies = self._copies is not None and self._state_slots is None
        if not copies or not MIN_COPIED_TOKENS <= useful < PAGE_TOKENS:
            return None
        return self._trees.child(scope, path, tokens)

    def _copy_for_slot(self, node: Node, tenant: int, slot: int) -> int | None:
        """Copy the node's page to a page of the sequence itself; None if there is no room."""
        assert self._copies is not None
        source, saved = node.page, node.saved
        if source is not None:
            # It is held while room is made, so that it is not evicted.
            self._pool.hold([source], slot, tenant)
            self._cached.remove(node)
        pages = self.take(1, tenant, slot)
        if pages is not None and source is not None:
            self._copies.copy(source, pages[0])
        elif pages is not None:
            self._copies.load(saved, pages[0])
        if source is not None:
            self.release([source], tenant)
        self._counts.update(copied=int(pages is not None))
        return None if pages is None else pages[0]

    def _replace(self, node: Node, page: int) -> None:
        """Store a node's tokens in ``page``, which is held, instead of a page that nobody holds."""
        old = node.page
        self._cached.remove(node)
        node.saved = None
        self._trees.set_page(node, page)
        self._pool.mark_whole(page)
        if old is not None:
            self._pool.give_back([old])
