"""The outputs of a mixture's graph with the experts that each token of a step uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from contract.arrays import Bytes, Ints
from contract.ir.graph import BufferKind, Graph
from contract.opcodes import Opcode

EXPERTS = "output.experts"
UNUSED = -1
"""Fills the ids of layers that use fewer experts than others."""

ExpertSink = Callable[[int, Ints], None]
"""Receives (first position, int32[positions, layers, used]): the expert ids of each layer that has
experts, by falling weight. Each position comes once and in order."""


def expert_output(layer: int) -> str:
    """The name of the output with the ids of a layer."""
    return f"{EXPERTS}[{layer}]"


def expert_outputs(graph: Graph) -> tuple[str, ...]:
    """The outputs of a graph with the ids of each layer, in order; none if its limits have no
    ``experts`` or its model is no mixture."""
    return tuple(decl.name for decl in graph.of_kind(BufferKind.OUTPUT) if _is_experts(decl.name))


def expert_buffers(graph: Graph) -> frozenset[str]:
    """All buffers that only the nodes of ``expert_outputs`` write."""
    outputs = set(expert_outputs(graph))
    return frozenset(
        node.operands[name].buffer
        for node in graph.nodes
        if node.opcode is Opcode.MOE_GATE_TOPK and node.operands["ids"].buffer in outputs
        for name in ("ids", "logits", "weights")
    )


def expert_ids(outputs: Mapping[str, Bytes], tokens: int, first: int, end: int) -> Ints:
    """int32[end - first, layers, used] of tokens ``first`` to ``end`` - 1 of a step of ``tokens``,
    from the bytes of its outputs."""
    names = sorted(filter(_is_experts, outputs), key=lambda name: int(name[len(EXPERTS) + 1 : -1]))
    layers = [outputs[name].view(np.int32).reshape(tokens, -1)[first:end] for name in names]
    width = max(ids.shape[1] for ids in layers)
    found = np.full((end - first, len(layers), width), UNUSED, np.int32)
    for number, ids in enumerate(layers):
        found[:, number, : ids.shape[1]] = ids
    return found


def _is_experts(name: str) -> bool:
    return name.startswith(EXPERTS)
