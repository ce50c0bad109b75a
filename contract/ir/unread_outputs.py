"""Removes from a graph the nodes whose results a step does not request."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from types import MappingProxyType

from contract.ir.nodes import BufferKind, Graph, Node
from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.spec import Access

ON_DEMAND = frozenset({Opcode.LOG_PROBABILITIES, Opcode.ROW_DIGEST})
"""Opcodes that a step computes only if it requests their results."""
HIDDEN_STATES = "output.hidden"
"""The hidden states that logits are computed from: an output of the steps that request it."""
ADAPTER_IDS = "request.adapter_ids"
"""The adapters of each token: an input of the steps in which a token has any."""


def kinds_of_steps(graph: Graph) -> int:
    """Number of graphs a model is lowered as: with and without the results of each on-demand
    opcode, the hidden states, the experts that its tokens use, drafts, and adapters."""
    reads_experts = any(
        node.opcode is Opcode.MOE_GATE_TOPK
        and graph.buffers[node.operands["ids"].buffer].kind is BufferKind.OUTPUT
        for node in graph.nodes
    )
    named = len(graph.buffers.keys() & {HIDDEN_STATES, ADAPTER_IDS})
    opcodes = len(graph.opcodes & (ON_DEMAND | {Opcode.VERIFY_K}))
    return int(2 ** (opcodes + reads_experts + named))


def without_outputs(graph: Graph, names: Collection[str]) -> Graph:
    """``graph`` without the nodes that write only buffers of ``names``, which no node reads, and
    without these buffers; ``graph`` itself if there are none. Its inputs stay the same."""
    if graph.buffers.keys().isdisjoint(names):
        return graph
    read = {buffer for node in graph.nodes for buffer in _buffers(node, Access.WRITE)}
    unread = set(names) - read
    written = [_buffers(node, Access.READ) for node in graph.nodes]
    # A barrier writes nothing.
    needed = [not buffers or not buffers <= unread for buffers in written]
    if all(needed):
        return graph
    nodes = tuple(itertools.compress(graph.nodes, needed))
    gone = unread.difference(*itertools.compress(written, needed))
    buffers = {name: decl for name, decl in graph.buffers.items() if name not in gone}
    return replace(graph, buffers=MappingProxyType(buffers), nodes=nodes)


def _buffers(node: Node, but: Access) -> set[str]:
    """The buffers of the operands whose access is not ``but``."""
    operands = TABLE[node.opcode].operands
    names = (o.name for o in operands if o.access is not but)
    return {node.operands[name].buffer for name in names if name in node.operands}
