"""Copies of KV pages: from page to page, to host memory and back, in the queue of steps.

A page number stands for the keys and values of 16 positions of every layer. Their stored bytes are
copied without conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from contract.dtypes import F32
from contract.ir.graph import Graph
from contract.ir.scratch import buffer_bytes
from contract.tier import Buffer, Tier
from reference.memory.planner import state_buffers
from reference.memory.row_copies import ONE_ROW, RowCopies, Saved, SavedPage, copying


class Copies(Protocol):
    """The copies that ``KvMemory`` needs."""

    def copy(self, source: int, target: int) -> None:
        """Queue a copy of page ``source`` to page ``target``."""

    def save(self, page: int) -> SavedPage:
        """Queue a copy of ``page`` to host memory. The page may be overwritten at once."""

    def load(self, saved: Saved, page: int) -> None:
        """Queue a copy of a saved page into ``page``, for any step submitted from now on. The saved
        page can be loaded again."""


class PageCopies(RowCopies):
    """Copies between the KV pools of ``graph``, which lie in ``buffers``: see ``RowCopies``. Raises
    ValueError for a graph without KV pools."""

    NOUN = "page"

    def __init__(self, tier: Tier, graph: Graph, buffers: Mapping[str, Buffer]) -> None:
        paged, _ = state_buffers(graph)
        pools = [decl for decl in graph.buffers.values() if decl.name in paged]
        if not pools:
            raise ValueError(f"graph {graph.name} has no KV pools")
        self.pages = int(pools[0].shape[0])
        widths = {
            pool.name: buffer_bytes(pool, ONE_ROW) // self.pages // F32.block_bytes
            for pool in pools
        }
        bound = {pool.name: buffers[pool.name] for pool in pools}
        super().__init__(tier, bound, widths, self.pages)
        # Each pool is bound twice, as source and as target of a copy between two of its pages.
        sources = {_source(name): buffer for name, buffer in bound.items()}
        graph = copying("copy rows", widths, (_source, self.pages), (str, self.pages))
        self._copy = self._lowered(graph, {**bound, **sources})

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all pools."""
        return self.row_bytes

    def copy(self, source: int, target: int) -> None:
        """Queue a copy of page ``source`` to another page ``target``."""
        assert source != target, f"page {source} is copied to itself"
        self._run(self._copy, [(source, target)])


def _source(name: str) -> str:
    return f"source.{name}"
