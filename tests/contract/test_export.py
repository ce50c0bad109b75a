"""Exports: JSON with costs that add up, Graphviz that parses, both deterministic."""

import json
import re
from collections import Counter
from typing import Any

from contract.dtypes import F32
from contract.ir.codec import graph_digest
from contract.ir.cost import graph_cost
from contract.ir.export import to_document, to_dot
from contract.ir.graph import BufferKind, GraphBuilder
from contract.ir.nodes import layer_of
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from tests.contract.graphs import decoder

KEY = ShapeKey(3, 2)
GRAPH = decoder()
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def document() -> Any:
    """As a reader of the JSON text sees it."""
    return json.loads(json.dumps(to_document(GRAPH, KEY, 40)))


def dot_edges(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^ +(\w+) -> (\w+) ", text, re.MULTILINE)


def test_exports_are_deterministic():
    assert json.dumps(to_document(GRAPH, KEY, 40)) == json.dumps(to_document(decoder(), KEY, 40))
    assert to_dot({"a": GRAPH}, KEY, 40) == to_dot({"a": decoder()}, KEY, 40)


def test_json_holds_the_graph_and_its_cost():
    found = document()
    total = graph_cost(GRAPH, KEY, 40)
    assert found["digest"] == graph_digest(GRAPH)
    assert found["key"] == {"tokens": 3, "rows": 2}
    assert [node["name"] for node in found["nodes"]] == [node.name for node in GRAPH.nodes]
    assert [b["name"] for b in found["buffers"]] == list(GRAPH.buffers)
    for field in ("bytes_read", "bytes_written", "flops"):
        assert found["totals"][field] == getattr(total, field)
        assert sum(node[field] for node in found["nodes"]) == getattr(total, field)
        assert sum(row[field] for row in found["op_mix"]) == getattr(total, field)
    counts = {row["opcode"]: row["nodes"] for row in found["op_mix"]}
    assert counts == Counter(node.opcode.name for node in GRAPH.nodes)


def test_json_shows_slices():
    node = next(n for n in document()["nodes"] if n["name"] == "layer[0].k")
    assert node["operands"]["y"] == {"buffer": "layer[0].qkv", "columns": [32, 48]}


def test_dot_has_a_cluster_a_layer_and_a_box_a_node():
    text = to_dot({"tiny": GRAPH}, KEY, 40)
    assert text.count("subgraph cluster_g0_l") == 2
    boxes = re.findall(r"^ +g0_n\d+ \[label=", text, re.MULTILINE)
    assert len(boxes) == len(GRAPH.nodes)
    bare = STRING.sub("", text)
    assert bare.count("{") == bare.count("}") == 4
    assert bare.count("[") == bare.count("]")


def test_dot_draws_the_flow_of_data():
    """An op that reads two slices is fed by the nodes that wrote them, and by no other."""
    text = to_dot({"tiny": GRAPH}, KEY, 40)
    number = {node.name: f"g0_n{i}" for i, node in enumerate(GRAPH.nodes)}
    edges = dot_edges(text)
    into = {source for source, target in edges if target == number["layer[0].kv_write"]}
    assert {number["layer[0].rope_k"], number["layer[0].v"]} <= into
    assert not {number["layer[0].q"], number["layer[0].k"]} & into
    attention = {s for s, target in edges if target == number["layer[0].attention"]}
    assert {number["layer[0].rope_q"], number["layer[0].kv_write"]} <= attention


def test_dot_of_several_graphs_keeps_them_apart():
    """A cluster a graph, none of its edges leads out of it, and every identifier is a box."""
    text = to_dot({"one": GRAPH, "three": decoder(3)}, KEY, 40)
    assert re.findall(r'subgraph cluster_g\d+ \{ label="(\w+)"', text) == ["one", "three"]
    edges = dot_edges(text)
    assert {source.split("_")[0] for source, _ in edges} == {"g0", "g1"}
    assert all(source.split("_")[0] == target.split("_")[0] for source, target in edges)
    boxes = re.findall(r"^ +(\w+) \[(?:label|shape)", text, re.MULTILINE)
    assert len(boxes) == len(set(boxes))
    assert {end for edge in edges for end in edge} <= set(boxes)


def test_dot_escapes_names():
    b = GraphBuilder('a "quoted" \\ name')
    x = b.buffer('x"\n\\', BufferKind.REQUEST, F32, ("tokens", 8))
    b.emit(Opcode.SCALE, 'node "n" \\', x=x, factor=2.0, y=b.output("y", "tokens", 8))
    text = to_dot({'a "label" \\': b.build()}, KEY, 1)
    bare = STRING.sub("", text)
    assert '"' not in bare
    assert "\\" not in bare
    assert bare.count("\n") == text.count("\n")


def test_layers_are_read_from_labels():
    assert layer_of("layer[12].norm") == 12
    assert layer_of("output.norm") is None
