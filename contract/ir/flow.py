"""The data flow of a graph: which node wrote the data that another node reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from contract.ir.nodes import Graph, View
from contract.ops import TABLE
from contract.spec import Access


@dataclass(frozen=True, slots=True)
class Flow:
    """Data a node reads from ``buffer``; ``source`` is the index of the node that wrote it, or None
    when the data is older than the step."""

    source: int | None
    buffer: str


@dataclass(frozen=True, slots=True)
class DataFlow:
    """``reads`` has the flows into each node; ``last`` has the last writers of each buffer."""

    reads: tuple[tuple[Flow, ...], ...]
    last: Mapping[str, tuple[int, ...]]


def data_flow(graph: Graph) -> DataFlow:
    """Read-after-write edges of a verified graph, by columns.

    A node depends on every node that wrote columns it reads. An in-place update replaces earlier
    writers whose columns it covers completely. Weights, tables and states that no node has updated
    yet have the source None."""
    writers: dict[str, list[tuple[int, View]]] = {}
    reads = []
    for index, node in enumerate(graph.nodes):
        flows: dict[Flow, None] = {}
        bound = [o for o in TABLE[node.opcode].operands if o.name in node.operands]
        for operand in bound:
            if operand.access is Access.WRITE:
                continue
            view = node.operands[operand.name]
            found: list[int | None] = [
                i for i, written in writers.get(view.buffer, []) if _meet(written, view)
            ]
            flows |= dict.fromkeys(Flow(source, view.buffer) for source in found or [None])
        for operand in bound:
            if operand.access is Access.READ:
                continue
            view = node.operands[operand.name]
            known = writers.get(view.buffer, [])
            if operand.access is Access.UPDATE:
                known = [w for w in known if not _covers(view, w[1])]
            writers[view.buffer] = [*known, (index, view)]
        reads.append(tuple(flows))
    return DataFlow(tuple(reads), {name: tuple(i for i, _ in w) for name, w in writers.items()})


def _meet(a: View, b: View) -> bool:
    if a.columns is None or b.columns is None:
        return True
    return a.columns[0] < b.columns[1] and b.columns[0] < a.columns[1]


def _covers(a: View, b: View) -> bool:
    if a.columns is None:
        return True
    return b.columns is not None and a.columns[0] <= b.columns[0] and b.columns[1] <= a.columns[1]
