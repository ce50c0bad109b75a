"""One step of a graph on a tier: arrays in by buffer name, bytes of the outputs out."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.ir.graph import BufferKind, Graph
from contract.ir.inputs import input_layout, pack_inputs
from contract.ir.scratch import buffer_bytes
from contract.shape_key import ShapeKey
from contract.tier import Buffer, Tier


def run_graph(
    tier: Tier, graph: Graph, step: ShapeKey, contents: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[np.uint8]]:
    """Every OUTPUT buffer after one step.

    ``contents`` has the rows of every WEIGHT and CONSTANT buffer, as bytes or elements, and of
    every REQUEST buffer; a STATE buffer begins with zeros. Nothing stays on the tier."""
    layout = input_layout(graph, step)
    inputs = {decl.name: contents[decl.name] for decl in graph.of_kind(BufferKind.REQUEST)}
    buffers: dict[str, Buffer] = {}
    try:
        for decl in graph.of_kind(BufferKind.WEIGHT, BufferKind.CONSTANT):
            rows = contents[decl.name]
            rows = rows.reshape(-1, rows.shape[-1]).view(np.uint8)
            buffers[decl.name] = tier.upload(decl, rows)
        for decl in graph.of_kind(BufferKind.STATE, BufferKind.OUTPUT):
            nbytes = max(4, buffer_bytes(decl, step))
            buffers[decl.name] = tier.alloc(decl, nbytes)
        requested = [decl.name for decl in graph.of_kind(BufferKind.OUTPUT)]
        batch = tier.lower(graph, buffers, step, layout)
        fence = tier.submit(batch, pack_inputs(layout, step, inputs), requested)
        tier.wait(fence)
        return dict(fence.outputs)
    finally:
        for buffer in buffers.values():
            tier.free(buffer)
