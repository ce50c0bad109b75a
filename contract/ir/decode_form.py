"""The decode form of a graph: FLASH_ATTN instead of FLASH_ATTN_BATCHED in steps of one token.

A family writes one graph for steps of any size, with FLASH_ATTN_BATCHED. In a step of at most one
token no slot can have two queries, so that graph can use FLASH_ATTN, which has the same bits.
Larger steps may hold several tokens of one slot and keep FLASH_ATTN_BATCHED."""

from __future__ import annotations

from dataclasses import replace

from contract.ir.nodes import Graph
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.spec import Stage


def decode_form(graph: Graph, bucket: ShapeKey) -> Graph:
    """The verified ``graph`` in the form that steps of at most the size of ``bucket`` execute.

    The result verifies and has nodes and buffers of the same names."""
    if bucket.tokens != 1 or Opcode.FLASH_ATTN_BATCHED not in graph.opcodes:
        return graph
    nodes = tuple(
        replace(node, opcode=Opcode.FLASH_ATTN)
        if node.opcode is Opcode.FLASH_ATTN_BATCHED
        else node
        for node in graph.nodes
    )
    return replace(graph, stage=Stage.DECODE, nodes=nodes)
