"""Bytes moved and FLOPs computed by nodes, counted from the opcode table, not measured.

Bytes are those of an implementation that caches nothing between nodes: each operand is read or
written once, and what two operands share is read once. Quantized weights count the bytes of their
blocks."""

from __future__ import annotations

from dataclasses import dataclass

from contract.ir.nodes import Graph, Node, View
from contract.ops import TABLE
from contract.shape_key import ShapeKey
from contract.spec import Access, Work, bind_shapes


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes read, bytes written and FLOPs (multiplications plus additions)."""

    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.flops + other.flops,
        )

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved, 0 for a node that moves nothing."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one operand that a node reads and writes."""

    bytes_read: int
    bytes_written: int


def cost(node: Node, graph: Graph, key: ShapeKey, context: int) -> Cost:
    """The cost of one node of a verified graph.

    ``context`` is the mean number of positions a query token attends, itself included."""
    work = _work(node, graph, key, context)
    moved = _traffic(node, graph, key, work).values()
    return Cost(
        sum(operand.bytes_read for operand in moved),
        sum(operand.bytes_written for operand in moved),
        TABLE[node.opcode].flops(work),
    )


def traffic(node: Node, graph: Graph, key: ShapeKey, context: int) -> dict[str, Traffic]:
    """The bytes of ``cost`` by operand name."""
    return _traffic(node, graph, key, _work(node, graph, key, context))


def _work(node: Node, graph: Graph, key: ShapeKey, context: int) -> Work:
    shapes = {name: graph.shape(view) for name, view in node.operands.items()}
    sizes = key.sizes()
    bound = bind_shapes(TABLE[node.opcode], shapes, node.params)
    return Work(
        {name: sizes[dim] if isinstance(dim, str) else dim for name, dim in bound.items()}, context
    )


def _traffic(node: Node, graph: Graph, key: ShapeKey, work: Work) -> dict[str, Traffic]:
    spec = TABLE[node.opcode]
    sizes = key.sizes()
    moved: dict[str, Traffic] = {}
    read: set[View] = set()
    for operand in spec.operands:
        view = node.operands.get(operand.name)
        if view is None:
            continue
        dtype = graph.buffers[view.buffer].dtype
        if operand.name in spec.touched:
            elements = spec.touched[operand.name](work)
        else:
            elements = 1
            for dim in graph.shape(view):
                elements *= sizes[dim] if isinstance(dim, str) else dim
        nbytes = elements // dtype.block_elements * dtype.block_bytes
        if dtype.row_extra_bytes:
            nbytes += elements // int(graph.shape(view)[-1]) * dtype.row_extra_bytes
        reads = operand.access is not Access.WRITE and operand.name not in spec.stored
        reads = reads and view not in read
        read |= {view} if reads else set()
        writes = operand.access is not Access.READ
        moved[operand.name] = Traffic(nbytes if reads else 0, nbytes if writes else 0)
    return moved


def graph_cost(graph: Graph, key: ShapeKey, context: int) -> Cost:
    """The cost of one step: the sum over all nodes."""
    return sum((cost(node, graph, key, context) for node in graph.nodes), Cost())
