"""Copies of KV pages: from page to page, to host memory and back, in the queue of steps.

A page number stands for the keys and values of 16 positions of every layer. Their stored bytes are
copied without conversion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import F32
from contract.execution import ExecutableGraph
from contract.ir.graph import BufferKind, Graph, GraphBuilder, View
from contract.ir.inputs import pack_inputs
from contract.ir.scratch import buffer_bytes
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Fence, Tier
from reference.memory.planner import state_buffers

PAIRS = "request.pairs"
SAVED = "saved"
"""The output with a page's bytes: its part of each pool, in the order of the pools."""
ONE_PAGE = ShapeKey(0, 1)
LOADS_UNDER_WAY = 8
"""The most loads of pages in flight: the tier has a snapshot of each page."""


class SavedPage:
    """A page in host memory, or being copied to it."""

    def __init__(self, tier: Tier, fence: Fence) -> None:
        self._tier = tier
        self._fence: Fence | None = fence
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)

    def bytes(self) -> NDArray[np.uint8]:
        """The page's bytes, pool after pool in the graph's order. Waits for the copy, but for
        nothing submitted later."""
        if self._fence is not None:
            self._tier.wait(self._fence)
            self._bytes, self._fence = self._fence.outputs[SAVED], None
        return self._bytes


class Copies(Protocol):
    """The copies that ``KvMemory`` needs."""

    def copy(self, source: int, target: int) -> None:
        """Queue a copy of page ``source`` to page ``target``."""

    def save(self, page: int) -> SavedPage:
        """Queue: what is in ``page`` now into host memory. The page may be written at once."""

    def load(self, saved: SavedPage, page: int) -> None:
        """Queue: what was saved into ``page``, for any step submitted from now on. What was saved
        stays and can be loaded again."""


class PageCopies:
    """Copies between the KV pools of ``graph``, which lie in ``buffers``.

    Every copy is a submission like a step. A call waits in two cases only: for a page that is
    loaded while it is still being saved, and for the oldest load when LOADS_UNDER_WAY are in
    flight. All graphs are lowered here. Raises ValueError for a graph without KV pools.
    """

    def __init__(self, tier: Tier, graph: Graph, buffers: Mapping[str, Buffer]) -> None:
        paged, _ = state_buffers(graph)
        pools = [decl for decl in graph.buffers.values() if decl.name in paged]
        if not pools:
            raise ValueError(f"graph {graph.name} has no KV pools")
        self.pages = int(pools[0].shape[0])
        self._tier = tier
        self._widths = {
            pool.name: buffer_bytes(pool, ONE_PAGE) // self.pages // F32.block_bytes
            for pool in pools
        }
        bound = {pool.name: buffers[pool.name] for pool in pools}
        saving = _saving(self._widths, self.pages)
        staging = saving.buffers[SAVED]
        self._staging = tier.alloc(staging, buffer_bytes(staging, ONE_PAGE))
        # Each pool is bound twice: source and target of a copy are different pages of it.
        sources = {_source(name): buffer for name, buffer in bound.items()}
        copying, loading = (make(self._widths, self.pages) for make in (_copying, _loading))
        self._copy = ExecutableGraph(tier, copying, {**bound, **sources}, ONE_PAGE)
        self._save = ExecutableGraph(tier, saving, {**bound, SAVED: self._staging}, ONE_PAGE)
        self._load = ExecutableGraph(tier, loading, bound, ONE_PAGE)
        for executable in (self._copy, self._save, self._load):
            for bucket in executable.buckets:
                executable.record(bucket)
        self._last: Fence | None = None
        self._loads: deque[Fence] = deque()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all pools."""
        return sum(self._widths.values()) * F32.block_bytes

    def copy(self, source: int, target: int) -> None:
        """Queue a copy of page ``source`` to page ``target``, which is another one."""
        assert source != target, f"page {source} is copied to itself"
        self._last = self._run(self._copy, source, target)

    def save(self, page: int) -> SavedPage:
        """Queue: what is in ``page`` now into host memory. The page may be written at once."""
        fence = self._last = self._run(self._save, page, 0, requested=(SAVED,))
        return SavedPage(self._tier, fence)

    def load(self, saved: SavedPage, page: int) -> None:
        """Queue: what was saved into ``page``, for any step submitted from now on."""
        if len(self._loads) == LOADS_UNDER_WAY:
            self._tier.wait(self._loads.popleft())
        self._last = self._run(self._load, 0, page, saved.bytes())
        self._loads.append(self._last)

    def close(self) -> None:
        """Wait for the last copy and free the staging buffer."""
        if self._last is not None:
            self._tier.wait(self._last)
            self._last = None
        self._loads.clear()
        self._tier.free(self._staging)

    def _run(
        self,
        graph: ExecutableGraph,
        source: int,
        target: int,
        data: NDArray[np.uint8] | None = None,
        requested: tuple[str, ...] = (),
    ) -> Fence:
        for page in (source, target):
            assert 0 <= page < self.pages, f"page {page} is not one of {self.pages}"
        arrays: dict[str, NDArray[Any]] = {PAIRS: np.array([[source, target]], np.int32)}
        if data is not None:
            arrays[SAVED] = data
        return graph.replay(pack_inputs(graph.inputs, ONE_PAGE, arrays), requested)


def _source(name: str) -> str:
    return f"source.{name}"


def _copying(widths: Mapping[str, int], pages: int) -> Graph:
    """The graph that copies one page of every pool to another page of the same pool."""
    builder = GraphBuilder("copy pages")
    pairs = builder.request(PAIRS, "rows", 2)
    for name, width in widths.items():
        source = builder.buffer(_source(name), BufferKind.STATE, F32, (pages, width))
        target = builder.buffer(name, BufferKind.STATE, F32, (pages, width))
        builder.emit(Opcode.COPY_ROWS, name, source=source, pairs=pairs, target=target)
    return builder.build()


def _saving(widths: Mapping[str, int], pages: int) -> Graph:
    """The graph that copies one page of every pool to an output of the step."""
    builder = GraphBuilder("save pages")
    pairs = builder.request(PAIRS, "rows", 2)
    parts = _parts(builder.output(SAVED, "rows", sum(widths.values())), widths)
    for name, width in widths.items():
        source = builder.buffer(name, BufferKind.STATE, F32, (pages, width))
        builder.emit(Opcode.COPY_ROWS, name, source=source, pairs=pairs, target=parts[name])
    return builder.build()


def _loading(widths: Mapping[str, int], pages: int) -> Graph:
    """The graph that copies one page of every pool from the inputs of the submission."""
    builder = GraphBuilder("load pages")
    pairs = builder.request(PAIRS, "rows", 2)
    saved = builder.buffer(SAVED, BufferKind.REQUEST, F32, ("rows", sum(widths.values())))
    parts = _parts(saved, widths)
    for name, width in widths.items():
        target = builder.buffer(name, BufferKind.STATE, F32, (pages, width))
        builder.emit(Opcode.COPY_ROWS, name, source=parts[name], pairs=pairs, target=target)
    return builder.build()


def _parts(page: View, widths: Mapping[str, int]) -> dict[str, View]:
    """The columns of each pool in the bytes of a page."""
    stops = np.cumsum(list(widths.values())).tolist()
    return {
        name: page[stop - width : stop]
        for (name, width), stop in zip(widths.items(), stops, strict=True)
    }
