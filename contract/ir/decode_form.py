"""The decode form of a graph: in a step of one token, attention has one query a slot.

A family writes one graph for steps of any size, with FLASH_ATTN_BATCHED. In a step of at most one
token no slot can have two queries, so the graph of such steps says FLASH_ATTN, which has the same
bits. Larger steps may hold several tokens of one slot and keep FLASH_ATTN_BATCHED.
"""

from __future__ import annotations

from dataclasses import replace

from contract.ir.nodes import Graph
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.spec import Stage


def decode_form(graph: Graph, bucket: ShapeKey) -> Graph:
    """The verified ``graph`` as steps of at most the size of ``bucket`` execute it.

    The result verifies and has the same nodes by name and the same buffers.
    """
    if bucket.tokens != 1 or Opcode.FLASH_ATTN_BATCHED not in graph.opcodes:
        return graph
    nodes = tuple(
        replace(node, opcode=Opcode.FLASH_ATTN)
        if node.opcode is Opcode.FLASH_ATTN_BATCHED
        else node
        for node in graph.nodes
    )
    return replace(graph, stage=Stage.DECODE, nodes=nodes)
