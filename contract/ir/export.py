"""Graphs for people and tools: JSON with costs, and Graphviz. Both are deterministic text."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from contract.ir.codec import graph_digest
from contract.ir.cost import Cost, cost
from contract.ir.nodes import BufferKind, Graph, Node, View
from contract.ops import TABLE
from contract.shape_key import ShapeKey
from contract.spec import Access

LAYER = re.compile(r"\[(\d+)\]")
"""Node and buffer labels of layer N carry ``[N]``."""

DRAWN = {
    BufferKind.STATE: "#ffe0b0",
    BufferKind.REQUEST: "#cfe8ff",
    BufferKind.SCRATCH: "#ffffff",
    BufferKind.OUTPUT: "#d5f5d0",
}
"""Kinds of buffers shown in Graphviz, with their colours."""


def layer_of(name: str) -> int | None:
    """The layer a label belongs to, or None for what is outside the layers."""
    match = LAYER.search(name)
    return int(match.group(1)) if match else None


def to_json(graph: Graph, key: ShapeKey, context: int) -> str:
    """The graph with the cost of every node for one ShapeKey, as indented JSON.

    ``context`` is the mean number of positions a query token attends. Keys: ``name``, ``stage``,
    ``digest``, ``key``, ``context``, ``buffers``, ``nodes``, ``totals``, ``op_mix`` (per opcode:
    nodes and cost, most bytes first).
    """
    costs = [cost(node, graph, key, context) for node in graph.nodes]
    mix: dict[str, Cost] = {}
    for node, node_cost in zip(graph.nodes, costs, strict=True):
        mix[node.opcode.name] = mix.get(node.opcode.name, Cost()) + node_cost
    counts = Counter(node.opcode.name for node in graph.nodes)
    ordered = sorted(mix, key=lambda name: (-mix[name].bytes_moved, name))
    document = {
        "name": graph.name,
        "stage": graph.stage.name,
        "digest": graph_digest(graph),
        "key": {"tokens": key.tokens, "rows": key.rows},
        "context": context,
        "totals": {"nodes": len(graph.nodes), **_cost_fields(sum(costs, Cost()))},
        "op_mix": [
            {"opcode": name, "nodes": counts[name], **_cost_fields(mix[name])} for name in ordered
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
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def to_dot(graph: Graph, key: ShapeKey, context: int) -> str:
    """The graph as Graphviz text: nodes in layer clusters, edges where data flows.

    An edge leads from what wrote a buffer's columns to each node that reads them, labelled with
    the buffer. Step inputs, outputs and state are drawn as ellipses; weights and tables are not.
    """
    lines = [f"digraph {_quote(graph.name)} {{", "  rankdir=TB; node [shape=box];"]
    clusters: dict[int | None, list[str]] = {}
    for index, node in enumerate(graph.nodes):
        label = _label(node, cost(node, graph, key, context))
        line = f"n{index} [label={label}];"
        clusters.setdefault(layer_of(node.name), []).append(line)
    for layer, members in clusters.items():
        if layer is None:
            lines += [f"  {line}" for line in members]
            continue
        lines.append(f"  subgraph cluster_{layer} {{ label={_quote(f'layer {layer}')};")
        lines += [f"    {line}" for line in members]
        lines.append("  }")
    lines += _edges(graph)
    lines.append("}")
    return "\n".join(lines) + "\n"


def _cost_fields(value: Cost) -> dict[str, int | float]:
    return {
        "bytes_read": value.bytes_read,
        "bytes_written": value.bytes_written,
        "flops": value.flops,
    }


def _node_fields(node: Node, node_cost: Cost) -> dict[str, Any]:
    return {
        "name": node.name,
        "opcode": node.opcode.name,
        "operands": {
            name: {"buffer": view.buffer, "columns": view.columns and list(view.columns)}
            for name, view in node.operands.items()
        },
        "params": dict(node.params),
        **_cost_fields(node_cost),
    }


def _edges(graph: Graph) -> list[str]:
    """Boxes of the buffers that outlive the step, and an edge for every flow of data."""
    boxes: dict[str, str] = {}
    edges: dict[str, None] = {}
    writers: dict[str, list[tuple[str, View]]] = {}

    def box(buffer: str) -> str:
        return boxes.setdefault(buffer, f"b{len(boxes)}")

    def edge(source: str, target: str, buffer: str) -> None:
        edges[f"  {source} -> {target} [label={_quote(buffer)}];"] = None

    for index, node in enumerate(graph.nodes):
        bound = [o for o in TABLE[node.opcode].operands if o.name in node.operands]
        for operand in bound:
            view = node.operands[operand.name]
            if operand.access is Access.WRITE or graph.buffers[view.buffer].kind not in DRAWN:
                continue
            sources = [name for name, w in writers.get(view.buffer, []) if _meet(w, view)]
            for source in sources or [box(view.buffer)]:
                edge(source, f"n{index}", view.buffer)
        for operand in bound:
            view = node.operands[operand.name]
            if operand.access is Access.UPDATE:
                kept = [w for w in writers.get(view.buffer, []) if not _meet(w[1], view)]
                writers[view.buffer] = [*kept, (f"n{index}", view)]
            elif operand.access is Access.WRITE:
                writers.setdefault(view.buffer, []).append((f"n{index}", view))
    for decl in graph.of_kind(BufferKind.STATE, BufferKind.OUTPUT):
        for source, _ in writers.get(decl.name, []):
            edge(source, box(decl.name), decl.name)
    drawn = [
        f"  {identifier} [shape=ellipse, style=filled, "
        f"fillcolor={_quote(DRAWN[graph.buffers[name].kind])}, label={_quote(name)}];"
        for name, identifier in boxes.items()
    ]
    return [*drawn, *edges]


def _meet(a: View, b: View) -> bool:
    if a.columns is None or b.columns is None:
        return True
    return a.columns[0] < b.columns[1] and b.columns[0] < a.columns[1]


def _label(node: Node, node_cost: Cost) -> str:
    moved, flops = node_cost.bytes_moved, node_cost.flops
    lines = (node.name, node.opcode.name, f"{moved:,} B, {flops:,} FLOP")
    return _quote("\n".join(lines))


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
