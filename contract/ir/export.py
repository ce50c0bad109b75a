"""Exports a graph with its costs as JSON values, and as Graphviz text. Both are deterministic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contract.ir.analysis import node_costs, op_mix
from contract.ir.codec import graph_digest
from contract.ir.cost import Cost
from contract.ir.flow import data_flow
from contract.ir.nodes import BufferKind, Graph, Node, layer_of
from contract.shape_key import ShapeKey

DRAWN = {
    BufferKind.STATE: "#ffe0b0",
    BufferKind.REQUEST: "#cfe8ff",
    BufferKind.SCRATCH: "#ffffff",
    BufferKind.OUTPUT: "#d5f5d0",
}
"""The kinds of buffers shown in Graphviz, with their colours."""


def to_document(
    graph: Graph, key: ShapeKey, context: int, costs: Sequence[Cost] | None = None
) -> dict[str, Any]:
    """The graph with the cost of every node for one ShapeKey, as JSON values.

    ``context`` is the mean number of positions a query token attends to. ``costs`` are those of
    ``node_costs`` and are computed when not given. Keys: ``name``, ``stage``, ``digest``, ``key``,
    ``context``, ``totals``, ``op_mix`` (per opcode: nodes and cost, most bytes first), ``buffers``,
    ``nodes``."""
    costs = node_costs(graph, key, context) if costs is None else costs
    return {
        "name": graph.name,
        "stage": graph.stage.name,
        "digest": graph_digest(graph),
        "key": {"tokens": key.tokens, "rows": key.rows},
        "context": context,
        "totals": {"nodes": len(graph.nodes), **cost_fields(sum(costs, Cost()))},
        "op_mix": [
            {"opcode": share.opcode, "nodes": share.nodes, **cost_fields(share.cost)}
            for share in op_mix(graph, costs)
        ],
        "buffers": [
            {
                "name": decl.name,
                "kind": decl.kind.name,
                "dtype": decl.dtype.name,
                "shape": list(decl.shape),
                "source": decl.source,
            }
            for decl in graph.buffers.values()
        ],
        "nodes": [
            _node_fields(node, node_cost)
            for node, node_cost in zip(graph.nodes, costs, strict=True)
        ],
    }


def cost_fields(value: Cost) -> dict[str, int]:
    """A cost as JSON values."""
    return {
        "bytes_read": value.bytes_read,
        "bytes_written": value.bytes_written,
        "flops": value.flops,
    }


def to_dot(graphs: Mapping[str, Graph], key: ShapeKey, context: int) -> str:
    """Labelled graphs as Graphviz text: a cluster per graph, and in it a cluster per layer.

    An edge leads from the node that wrote a buffer's columns to each node that reads them; its
    label is the buffer. Step inputs, outputs and states are ellipses; weights and tables are not
    drawn."""
    lines = [f"digraph {_quote(', '.join(graphs))} {{", "  rankdir=TB; node [shape=box];"]
    for number, (label, graph) in enumerate(graphs.items()):
        lines.append(f"  subgraph cluster_g{number} {{ label={_quote(label)};")
        lines += [f"    {line}" for line in _drawing(graph, f"g{number}", key, context)]
        lines.append("  }")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _drawing(graph: Graph, prefix: str, key: ShapeKey, context: int) -> list[str]:
    """The boxes and edges of one graph; ``prefix`` keeps its identifiers distinct from other
    graphs'."""
    lines: list[str] = []
    clusters: dict[int | None, list[str]] = {}
    costs = node_costs(graph, key, context)
    for index, (node, node_cost) in enumerate(zip(graph.nodes, costs, strict=True)):
        line = f"{prefix}_n{index} [label={_label(node, node_cost)}];"
        clusters.setdefault(layer_of(node.name), []).append(line)
    for layer, members in clusters.items():
        if layer is None:
            lines += members
            continue
        lines.append(f"subgraph cluster_{prefix}_l{layer} {{ label={_quote(f'layer {layer}')};")
        lines += [f"  {line}" for line in members]
        lines.append("}")
    return lines + _edges(graph, prefix)


def _edges(graph: Graph, prefix: str) -> list[str]:
    """The ellipses of the buffers that outlive the step, and an edge for every flow of data."""
    boxes: dict[str, str] = {}
    edges: dict[str, None] = {}
    flow = data_flow(graph)

    def box(buffer: str) -> str:
        return boxes.setdefault(buffer, f"{prefix}_b{len(boxes)}")

    def edge(source: str, target: str, buffer: str) -> None:
        edges[f"{source} -> {target} [label={_quote(buffer)}];"] = None

    for index, flows in enumerate(flow.reads):
        for read in flows:
            if graph.buffers[read.buffer].kind in DRAWN:
                source = box(read.buffer) if read.source is None else f"{prefix}_n{read.source}"
                edge(source, f"{prefix}_n{index}", read.buffer)
    for decl in graph.of_kind(BufferKind.STATE, BufferKind.OUTPUT):
        for writer in flow.last.get(decl.name, ()):
            edge(f"{prefix}_n{writer}", box(decl.name), decl.name)
    drawn = [
        f"{identifier} [shape=ellipse, style=filled, "
        f"fillcolor={_quote(DRAWN[graph.buffers[name].kind])}, label={_quote(name)}];"
        for name, identifier in boxes.items()
    ]
    return [*drawn, *edges]


def _node_fields(node: Node, node_cost: Cost) -> dict[str, Any]:
    return {
        "name": node.name,
        "opcode": node.opcode.name,
        "operands": {
            name: {"buffer": view.buffer, "columns": view.columns and list(view.columns)}
            | ({} if view.rows is None else {"rows": view.rows})
            for name, view in node.operands.items()
        },
        "params": dict(node.params),
        **cost_fields(node_cost),
    }


def _label(node: Node, node_cost: Cost) -> str:
    moved, flops = node_cost.bytes_moved, node_cost.flops
    lines = (node.name, node.opcode.name, f"{moved:,} B, {flops:,} FLOP")
    return _quote("\n".join(lines))


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
