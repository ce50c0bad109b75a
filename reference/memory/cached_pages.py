"""The cached pages that no sequence holds, in the order in which they are evicted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from reference.memory.page_copies import Copies
from reference.memory.pages import PagePool
from reference.memory.prefix import Node, PrefixTrees
from reference.memory.state_slots import StateSlots


class CachedPages:
    """The nodes of ``trees`` whose pages no sequence holds, least recently used first:
    ``on_device``, and ``in_host`` if the page was saved in host memory, which ``copies`` does for
    up to ``host_pages`` evicted pages."""

    def __init__(
        self,
        trees: PrefixTrees,
        pool: PagePool,
        states: StateSlots | None,
        copies: Copies | None,
        host_pages: int,
        counts: Counter[str],
    ) -> None:
        self.on_device: OrderedDict[Node, None] = OrderedDict()
        self.in_host: OrderedDict[Node, None] = OrderedDict()
        self._trees = trees
        self._pool = pool
        self._states = states
        self._copies = copies
        self._host_pages = host_pages
        self._counts = counts

    def remove(self, node: Node) -> None:
        """Keep the node, which a sequence holds or whose page is replaced, from being evicted."""
        self.on_device.pop(node, None)
        self.in_host.pop(node, None)

    def touch(self, node: Node) -> None:
        """Make the node and those above it the most recently used ones."""
        for used in node.upward():
            for recency in (self.on_device, self.in_host):
                if used in recency:
                    recency.move_to_end(used)

    def restore(self, nodes: Sequence[Node], pages: Sequence[int]) -> None:
        """Load nodes from host memory to these pages."""
        for node, page in zip(nodes, pages, strict=True):
            assert self._copies is not None
            self._copies.load(node.saved, page)
            node.saved = None
            self._trees.set_page(node, page)
            self._pool.mark_whole(page)
        self._counts.update(restored=len(nodes))

    def evict(self) -> None:
        """Free the least recently used page. If it is not saved in host memory, free those of the
        nodes below it too, which can no longer be found."""
        node = next(iter(self.on_device))
        if not self._host_pages:
            self.drop(node)
            return
        while len(self.in_host) >= self._host_pages:
            self.drop(next(iter(self.in_host)))
        # The page dropped to make room may have been above the node.
        if node.parent is not None:
            self._save(node)

    def _save(self, node: Node) -> None:
        """Move a page to host memory."""
        assert self._copies is not None
        page = node.page
        assert page is not None
        node.saved = self._copies.save(page)
        self._trees.set_page(node, None)
        del self.on_device[node]
        self.in_host[node] = None
        self._pool.give_back([page])
        self._counts.update(evicted=1, spilled=1)

    def drop(self, node: Node) -> None:
        """Forget the node and those below it, and free their pages and states."""
        for gone in self._trees.drop(node):
            if gone in self.on_device:
                del self.on_device[gone]
                assert gone.page is not None
                self._pool.give_back([gone.page])
                self._counts.update(evicted=1)
            self.in_host.pop(gone, None)
            if self._states is not None:
                self._states.forget(gone)
