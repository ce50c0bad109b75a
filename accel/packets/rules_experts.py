"""Lowers the mixture-of-experts opcodes, and products of heads by a stack of matrices."""

from __future__ import annotations

from collections.abc import Mapping

from accel.packets.lowering import NO_EXPERTS, PRIVATE_ELEMENTS, Field, Lowering, Rule
from accel.packets.ops import SLOTS
from accel.packets.step import Count, Tensor
from contract.dtypes import F32
from contract.ir.nodes import Node
from contract.opcodes import Opcode

RENORMALIZE, SOFTMAX = 1, 2
"""Bits of the size ``weighting``: packets have as many sizes as the op with the most of them."""
CHUNK_WORDS = 3
"""32-bit words of the CHUNK record of ``accel/kernels/chunks.k``."""


def _gate_topk(low: Lowering, node: Node) -> None:
    dims, tokens = low.dims(node), low.count(node)
    x, logits = low.tensor(node.operands["x"]), low.tensor(node.operands["logits"])
    products = logits
    if "bias" in node.operands:
        products = low.new(f"{node.name}.products", tokens.maximum, dims["experts"])
    low.product(x, node.operands["gate_weight"], products, tokens)
    if products is not logits:
        bias = low.tensor(node.operands["bias"])
        low.elementwise("bias_add", tokens, {"x": products, "bias": bias, "y": logits})
    columns = dims["experts"] + dims["used"]
    if "choice_bias" in node.operands:
        bias = low.tensor(node.operands["choice_bias"])
        s = low.new(f"{node.name}.s", tokens.maximum, columns)
        weighting = RENORMALIZE * dims["renormalize"] + SOFTMAX * dims["softmax"]
        low.lower(node, "expert_choice", bias=bias, s=s, weighting=weighting, private="logits")
        return
    p = low.new(f"{node.name}.p", tokens.maximum, columns)
    low.lower(node, "expert_topk", p=p, private="logits")


def _grouped(low: Lowering, ids: Tensor, tokens: Count, experts: int) -> tuple[Tensor, Tensor]:
    """The chunks and the order of a routing, computed once for all products that use it."""
    known = low.expert_groups.get((ids, tokens))
    if known is None:
        pairs = tokens.times(ids.columns)
        name = f"{ids.buffer}[{ids.start}:{ids.stop}].{tokens.per.name.lower()}"
        chunks = low.new(f"{name}.chunks", _max_chunks(pairs, experts) + 1, CHUNK_WORDS)
        order = low.new(f"{name}.order", 2, pairs.maximum)
        known = low.expert_groups[ids, tokens] = chunks, order
        low.add(
            "expert_group",
            ids=ids,
            starts=low.new(f"{name}.starts", 1, experts),
            chunks=chunks,
            order=order,
            tokens=tokens,
            used=ids.columns,
            experts=experts,
            private=pairs.maximum + experts <= PRIVATE_ELEMENTS,
        )
    return known


def _max_chunks(pairs: Count, experts: int) -> int:
    """Most chunks of SLOTS pairs, when no chunk has pairs of two experts."""
    return min(pairs.maximum, experts + pairs.maximum // SLOTS)


def _product(
    low: Lowering, node: Node, x: str, weight: str, bias: str, y: Tensor, row_pairs: int
) -> None:
    """y = x weight[ids]^T + bias[ids]. A row of y is a pair of a token and an expert; ``row_pairs``
    of them share a row of x.

    The node may have no operand ``bias``."""
    dims, tokens = low.dims(node), low.count(node)
    used, experts = dims["used"], dims["experts"]
    ids, pairs = low.tensor(node.operands["ids"]), tokens.times(used)
    routing = _routing(low, ids, tokens, used, experts)
    source = low.tensor(node.operands[x])
    if bias not in node.operands:
        low.product(source, node.operands[weight], y, pairs, routing, row_pairs)
        return
    products = low.new(f"{node.name}.{weight}.products", pairs.maximum, y.columns)
    low.product(source, node.operands[weight], products, pairs, routing, row_pairs)
    biases = low.tensor(node.operands[bias])
    added = {"x": products, "ids": ids, "bias": biases, "y": y}
    low.elementwise("expert_bias", pairs, added, used=used)


def _routing(
    low: Lowering, ids: Tensor, tokens: Count, used: int, experts: int
) -> dict[str, Field]:
    """The routing fields of products by the experts ``ids`` of each token. The experts of a single
    token are products of their own, so nothing is grouped."""
    pairs = tokens.times(used)
    routing: dict[str, Field] = {
        "ids": ids,
        "used": used,
        "max_chunks": _max_chunks(pairs, experts),
    }
    if tokens.maximum > 1:
        routing["chunks"], routing["order"] = _grouped(low, ids, tokens, experts)
    return routing


def _gate_up(low: Lowering, node: Node) -> None:
    used = low.dims(node)["used"]
    for name in ("gate", "up"):
        if node.operands[name].buffer not in low.read_buffers:
            continue  # Of experts without gates.
        y = low.tensor(node.operands[name])
        _product(low, node, "x", f"{name}_weight", f"{name}_bias", y, used)


def _swiglu(low: Lowering, node: Node) -> None:
    pairs = low.count(node).times(low.dims(node)["used"])
    low.elementwise("swiglu", pairs, low.tensors(node), **node.params)


def _down_acc(low: Lowering, node: Node) -> None:
    hidden, pairs = low.dims(node)["hidden"], low.count(node).times(low.dims(node)["used"])
    products = low.new(f"{node.name}.products", pairs.maximum, hidden)
    _product(low, node, "x", "down_weight", "bias", products, 1)
    low.lower(node, "expert_sum", products=products, width=hidden)


def _shared_expert(low: Lowering, node: Node) -> None:
    dims, tokens = low.dims(node), low.count(node)
    width, hidden = dims["width"], dims["hidden"]
    x = low.tensor(node.operands["x"])
    gate, up, gated = (
        low.new(f"{node.name}.{name}", tokens.maximum, width) for name in ("gate", "up", "gated")
    )
    router = None
    if "router_weight" in node.operands:
        router = low.new(f"{node.name}.router", tokens.maximum, 1)
        low.add(
            "matmul",
            NO_EXPERTS,
            x=x,
            weight=low.tensor(node.operands["router_weight"]),
            y=router,
            tokens=tokens,
            rows=1,
            columns=hidden,
            row_pairs=0,
            dtype=F32,
            matrix=False,
        )
    low.product(x, node.operands["gate_weight"], gate, tokens)
    low.product(x, node.operands["up_weight"], up, tokens)
    low.elementwise("swiglu", tokens, {"gate": gate, "up": up, "y": gated}, activation=0)
    down = low.new(f"{node.name}.down", tokens.maximum, hidden)
    low.product(gated, node.operands["down_weight"], down, tokens)
    low.lower(node, "gated_add", gate=router, x=down, width=hidden)


def _head_product(low: Lowering, node: Node) -> None:
    """A head of a token is a pair of a token and an expert; all tokens have the same ids, which
    are one row for all."""
    dims, tokens = low.dims(node), low.count(node)
    heads, inner = dims["heads"], dims["inner"]
    pairs = tokens.times(heads)
    ids = low.tensor(node.operands["matrix_of"])._replace(stride=0)
    routing = _routing(low, ids, tokens, heads, dims["matrices"])
    x = _by_head(_whole_rows(low, node, "x"), heads)
    target = low.tensor(node.operands["y"])
    whole = target
    if target.columns != target.stride:
        whole = low.new(f"{node.name}.whole", tokens.maximum, target.columns)
    y = _by_head(whole, heads)
    products = y._replace(start=y.columns - dims["outputs"], columns=dims["outputs"])
    read = x._replace(start=x.columns - inner, columns=inner)
    low.product(read, node.operands["weight"], products, pairs, routing, 1)
    if "rest" in node.operands:
        rest = _by_head(_whole_rows(low, node, "rest"), heads)
        before = y._replace(columns=rest.columns)
        low.elementwise("scale", pairs, {"x": rest, "y": before}, factor=1.0)
    if whole is not target:
        low.elementwise("scale", tokens, {"x": whole, "y": target}, factor=1.0)


def _whole_rows(low: Lowering, node: Node, name: str) -> Tensor:
    """An operand as whole rows of a buffer: itself, or a copy of the columns that it is."""
    found = low.tensor(node.operands[name])
    if found.columns == found.stride:
        return found
    copy = low.new(f"{node.name}.{name}", low.count(node).maximum, found.columns)
    low.elementwise("scale", low.count(node), {"x": found, "y": copy}, factor=1.0)
    return copy


def _by_head(whole: Tensor, heads: int) -> Tensor:
    """Whole rows of a buffer as a row for each head."""
    width = whole.columns // heads
    return whole._replace(columns=width, stride=width)


EXPERT_RULES: Mapping[Opcode, Rule] = {
    Opcode.MOE_GATE_TOPK: _gate_topk,
    Opcode.MOE_GATE_UP: _gate_up,
    Opcode.MOE_SWIGLU: _swiglu,
    Opcode.MOE_DOWN_ACC: _down_acc,
    Opcode.SHARED_EXPERT: _shared_expert,
    Opcode.HEAD_PRODUCT: _head_product,
}
"""The lowering of each opcode."""
