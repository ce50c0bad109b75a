"""The graph of steps without drafts, made of that of steps with some."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from contract.ir.graph import Graph
from contract.opcodes import Opcode


def without_drafts(graph: Graph) -> Graph:
    """The graph of the same limits with ``draft_tokens`` 0: without VERIFY_K, the barrier before
    it, and buffers that only it uses."""
    at = next(i for i, node in enumerate(graph.nodes) if node.opcode is Opcode.VERIFY_K)
    nodes = (*graph.nodes[: at - 1], *graph.nodes[at + 1 :])
    used = {view.buffer for node in nodes for view in node.operands.values()}
    own = {view.buffer for view in graph.nodes[at].operands.values()} - used
    buffers = {name: decl for name, decl in graph.buffers.items() if name not in own}
    return replace(graph, buffers=MappingProxyType(buffers), nodes=nodes)
