"""Plans scratch memory: buffers whose lifetimes do not overlap share bytes.

A tier allocates the plan of one ShapeKey. Nodes execute in order, so a buffer lives from the first
node that touches it to the last."""

from __future__ import annotations

from collections.abc import Mapping

from contract.ir.graph import BufferDecl, BufferKind, Graph
from contract.lazy_dataclass import dataclass
from contract.shape_key import ShapeKey

ALIGNMENT = 256
"""Alignment of buffers in bytes, the strictest of the supported devices."""


@dataclass(frozen=True, slots=True)
class ScratchPlan:
    """The byte offset of every SCRATCH buffer in one allocation of ``nbytes`` bytes."""

    offsets: Mapping[str, int]
    nbytes: int


def concrete_shape(decl: BufferDecl, key: ShapeKey) -> tuple[int, ...]:
    """The buffer's shape with symbols replaced by the key's sizes."""
    sizes = key.sizes()
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in decl.shape)


def buffer_bytes(decl: BufferDecl, key: ShapeKey) -> int:
    """Bytes of the buffer for a step of ``key``."""
    shape = concrete_shape(decl, key)
    rows = 1
    for dim in shape[:-1]:
        rows *= dim
    return rows * decl.dtype.row_bytes(shape[-1])


def plan_scratch(graph: Graph, key: ShapeKey) -> ScratchPlan:
    """Assign first-fit offsets in order of first use; the result is deterministic."""
    lifetimes = _lifetimes(graph)
    live: list[tuple[int, int, int]] = []
    offsets: dict[str, int] = {}
    nbytes = 0
    for name, (first, last) in sorted(lifetimes.items(), key=lambda item: (item[1], item[0])):
        size = -(-buffer_bytes(graph.buffers[name], key) // ALIGNMENT) * ALIGNMENT
        live = [placement for placement in live if placement[0] >= first]
        offset = _first_fit(live, size)
        offsets[name] = offset
        live.append((last, offset, size))
        nbytes = max(nbytes, offset + size)
    return ScratchPlan(offsets, nbytes)


def _lifetimes(graph: Graph) -> dict[str, tuple[int, int]]:
    lifetimes: dict[str, tuple[int, int]] = {}
    for index, node in enumerate(graph.nodes):
        for view in node.operands.values():
            if graph.buffers[view.buffer].kind is BufferKind.SCRATCH:
                first, _ = lifetimes.get(view.buffer, (index, index))
                lifetimes[view.buffer] = (first, index)
    return lifetimes


def _first_fit(live: list[tuple[int, int, int]], size: int) -> int:
    """The lowest offset at which ``size`` bytes overlap none of (last node, offset, bytes)."""
    offset = 0
    for _, start, length in sorted(live, key=lambda placement: placement[1]):
        if offset + size <= start:
            break
        offset = max(offset, start + length)
    return offset
