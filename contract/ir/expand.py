"""Replaces fused opcodes by their parts, so that a tier needs kernels only for the parts.

A fused opcode is defined as the composition of its parts, so the bits are the same. A tier keeps a
fused node if it has a kernel for it. LM_HEAD becomes MATMUL, the same product.

MOE_SWIGLU and SHARED_EXPERT are never replaced: MOE_SWIGLU's tensors have an axis that SWIGLU
lacks, and no other opcode applies SHARED_EXPERT's factor per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from contract.dtypes import F32
from contract.ir.nodes import BufferDecl, BufferKind, Graph, Node, View
from contract.opcodes import Opcode
from contract.spec import Scalar


def expand(graph: Graph, keep: frozenset[Opcode] = frozenset()) -> Graph:
    """Replace the fused nodes of the verified ``graph`` by their parts, except opcodes in ``keep``.

    The result verifies. Parts and the scratch buffers between them are named after their node. An
    in-place update is always the last part, so the barriers after the node remain valid."""
    requested = EXPANSIONS.keys() - keep
    if not graph.opcodes & requested:
        return graph
    parts = _Parts(graph)
    for node in graph.nodes:
        if node.opcode in requested:
            EXPANSIONS[node.opcode](parts, node)
        else:
            parts.nodes.append(node)
    return Graph(graph.name, graph.stage, MappingProxyType(parts.buffers), tuple(parts.nodes))


class _Parts:
    """Collects the nodes and buffers of the new graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.buffers: dict[str, BufferDecl] = dict(graph.buffers)
        self.nodes: list[Node] = []
        self._names = {node.name for node in graph.nodes}

    def add(
        self,
        node: Node,
        part: str,
        opcode: Opcode,
        operands: Mapping[str, View],
        params: Mapping[str, Scalar] = MappingProxyType({}),
    ) -> None:
        """Append a node for ``part`` of ``node``."""
        name = f"{node.name}.{part}"
        while name in self._names:
            name += "'"
        self._names.add(name)
        self.nodes.append(Node(name, opcode, MappingProxyType(dict(operands)), params))

    def like(self, node: Node, part: str, x: View) -> View:
        """Declare a scratch buffer of the shape of ``x``."""
        name = f"scratch.{node.name}.{part}"
        while name in self.buffers:
            name += "'"
        self.buffers[name] = BufferDecl(name, BufferKind.SCRATCH, F32, self.graph.shape(x))
        return View(name)

    def norm(
        self, node: Node, part: str, x: View, weight: View, y: View, groups: Scalar = 1
    ) -> None:
        """Append y = rms_norm(x) weight, with the eps of ``node``."""
        params = MappingProxyType({"eps": node.params["eps"], "groups": groups})
        self.add(node, part, Opcode.RMS_NORM, {"x": x, "weight": weight, "y": y}, params)

    def columns(self, x: View, start: int, stop: int) -> View:
        """Columns [start, stop) of the view ``x``."""
        first = x.columns[0] if x.columns else 0
        return View(x.buffer, (first + start, first + stop))


def _lm_head(parts: _Parts, node: Node) -> None:
    given = node.operands
    operands = {"x": given["x"], "weight": given["weight"], "y": given["logits"]}
    parts.add(node, "product", Opcode.MATMUL, operands)


def _residual_rms_norm(parts: _Parts, node: Node) -> None:
    given = node.operands
    operands = {"a": given["residual"], "b": given["x"], "y": given["sum"]}
    parts.add(node, "sum", Opcode.ADD, operands)
    parts.norm(node, "norm", given["sum"], given["norm_weight"], given["y"])


def _norm_products(*names: str) -> Callable[[_Parts, Node], None]:
    """Expand to one norm, then for each name a product: norm times name_weight^T is written to
    name."""

    def expansion(parts: _Parts, node: Node) -> None:
        given = node.operands
        h = parts.like(node, "norm", given["x"])
        parts.norm(node, "norm", given["x"], given["norm_weight"], h)
        for name in names:
            operands = {"x": h, "weight": given[f"{name}_weight"], "y": given[name]}
            parts.add(node, name, Opcode.MATMUL, operands)

    return expansion


def _norm_rope_kv_write(parts: _Parts, node: Node) -> None:
    given, params = node.operands, node.params
    head_dim = int(params["head_dim"])
    queries, keys = (int(params[name]) * head_dim for name in ("heads", "kv_heads"))
    q = parts.columns(given["qkv"], 0, queries)
    k = parts.columns(given["qkv"], queries, queries + keys)
    v = parts.columns(given["qkv"], queries + keys, queries + 2 * keys)
    rotated = parts.like(node, "k", k)
    for name, x, heads, y in (("q", q, "heads", given["q"]), ("k", k, "kv_heads", rotated)):
        if f"{name}_norm" in given:
            normed = parts.like(node, f"{name}_norm", x)
            parts.norm(node, f"{name}_norm", x, given[f"{name}_norm"], normed, params[heads])
            x = normed
        tables = {"rope_table": given["rope_table"], "query": given["query"]}
        sizes = {"heads": params[heads], "head_dim": head_dim, "neox": params["neox"]}
        operands = {"x": x, **tables, "y": y}
        parts.add(node, f"{name}_rope", Opcode.ROPE, operands, MappingProxyType(sizes))
    shared = {name: given[name] for name in ("query", "page_table", "kv")}
    sizes = {"kv_heads": params["kv_heads"], "head_dim": head_dim}
    operands = {"k": rotated, "v": v, **shared}
    parts.add(node, "kv_write", Opcode.KV_WRITE_BATCHED, operands, MappingProxyType(sizes))


EXPANSIONS: Mapping[Opcode, Callable[[_Parts, Node], None]] = {
    Opcode.LM_HEAD: _lm_head,
    Opcode.RESIDUAL_RMS_NORM: _residual_rms_norm,
    Opcode.RMS_NORM_FUSED_QKV: _norm_products("q", "k", "v"),
    Opcode.RMS_NORM_FUSED_MLP_GATE_UP: _norm_products("gate", "up"),
    Opcode.RMS_NORM_FUSED_ROPE_KV_WRITE: _norm_rope_kv_write,
}
"""The function that replaces a node of each fused opcode."""
