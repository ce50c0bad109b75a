"""Exports: JSON with costs that add up, Graphviz that parses, both deterministic."""

from __future__ import annotations

import json
import re
from collections import Counter

from contract.dtypes import F32
from contract.ir.codec import graph_digest
from contract.ir.cost import graph_cost
from contract.ir.export import layer_of, to_dot, to_json
from contract.ir.graph import BufferKind, GraphBuilder
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from tests.contract.graphs import decoder

KEY = ShapeKey(3, 2)
GRAPH = decoder()
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def dot_edges(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^  (\w+) -> (\w+) ", text, re.MULTILINE)


def test_exports_are_deterministic() -> None:
    assert to_json(GRAPH, KEY, 40) == to_json(decoder(), KEY, 40)
    assert to_dot(GRAPH, KEY, 40) == to_dot(decoder(), KEY, 40)


def test_json_holds_the_graph_and_its_cost() -> None:
    document = json.loads(to_json(GRAPH, KEY, 40))
    total = graph_cost(GRAPH, KEY, 40)
    assert document["digest"] == graph_digest(GRAPH)
    assert document["key"] == {"tokens": 3, "rows": 2}
    assert [node["name"] for node in document["nodes"]] == [node.name for node in GRAPH.nodes]
    assert [b["name"] for b in document["buffers"]] == list(GRAPH.buffers)
    for field in ("bytes_read", "bytes_written", "flops"):
        assert document["totals"][field] == getattr(total, field)
        assert sum(node[field] for node in document["nodes"]) == getattr(total, field)
        assert sum(row[field] for row in document["op_mix"]) == getattr(total, field)
    counts = {row["opcode"]: row["nodes"] for row in document["op_mix"]}
    assert counts == Counter(node.opcode.name for node in GRAPH.nodes)


def test_json_shows_slices() -> None:
    document = json.loads(to_json(GRAPH, KEY, 40))
    node = next(n for n in document["nodes"] if n["name"] == "layer[0].k")
    assert node["operands"]["y"] == {"buffer": "layer[0].qkv", "columns": [32, 48]}


def test_dot_has_a_cluster_a_layer_and_a_box_a_node() -> None:
    text = to_dot(GRAPH, KEY, 40)
    assert text.count("subgraph cluster_") == 2
    boxes = re.findall(r"^ +n\d+ \[label=", text, re.MULTILINE)
    assert len(boxes) == len(GRAPH.nodes)
    bare = STRING.sub("", text)
    assert bare.count("{") == bare.count("}") == 3
    assert bare.count("[") == bare.count("]")


def test_dot_draws_the_flow_of_data() -> None:
    """An op that reads two slices is fed by the nodes that wrote them, and by no other."""
    text = to_dot(GRAPH, KEY, 40)
    number = {node.name: f"n{i}" for i, node in enumerate(GRAPH.nodes)}
    edges = dot_edges(text)
    into = {source for source, target in edges if target == number["layer[0].kv_write"]}
    assert {number["layer[0].rope_k"], number["layer[0].v"]} <= into
    assert not {number["layer[0].q"], number["layer[0].k"]} & into
    attention = {s for s, target in edges if target == number["layer[0].attention"]}
    assert {number["layer[0].rope_q"], number["layer[0].kv_write"]} <= attention


def test_dot_escapes_names() -> None:
    b = GraphBuilder('a "quoted" \\ name')
    x = b.buffer('x"\n\\', BufferKind.REQUEST, F32, ("tokens", 8))
    b.emit(Opcode.SCALE, 'node "n" \\', x=x, factor=2.0, y=b.output("y", "tokens", 8))
    text = to_dot(b.build(), KEY, 1)
    bare = STRING.sub("", text)
    assert '"' not in bare
    assert "\\" not in bare
    assert bare.count("\n") == text.count("\n")


def test_layers_are_read_from_labels() -> None:
    assert layer_of("layer[12].norm") == 12
    assert layer_of("output.norm") is None
