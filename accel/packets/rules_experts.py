"""Lowers the mixture-of-experts opcodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from accel.packets.lowering import NO_EXPERTS, PRIVATE_ELEMENTS, Field, Lowering, cheap
from accel.packets.ops import SLOTS
from accel.packets.step import Count, Tensor
from contract.dtypes import F32
from contract.ir.nodes import Node
from contract.opcodes import Opcode

CHUNK_WORDS = 3
"""32-bit words of the CHUNK record of ``accel/kernels/chunks.k``."""


def _gate_topk(low: Lowering, node: Node) -> None:
    dims, tokens = low.dims(node), low.count(node)
    names = ("x", "logits", "ids", "weights")
    tensors = {name: low.tensor(node.operands[name]) for name in names}
    experts, used = dims["experts"], dims["used"]
    products = logits = tensors["logits"]
    if "bias" in node.operands:
        products = low.new(f"{node.name}.products", tokens.most, experts)
    low.product(tensors.pop("x"), node.operands["gate_weight"], products, tokens)
    if products is not logits:
        bias = low.tensor(node.operands["bias"])
        low.elementwise("bias_add", tokens, {"x": products, "bias": bias, "y": logits})
    chosen, scratch = "expert_topk", "p"
    if "choice_bias" in node.operands:
        chosen, scratch = "expert_choice", "s"
        tensors["bias"] = low.tensor(node.operands["choice_bias"])
    low.add(
        chosen,
        tensors,
        {scratch: low.new(f"{node.name}.{scratch}", tokens.most, experts + used)},
        tokens=tokens,
        experts=experts,
        used=used,
        private=cheap(tokens, experts),
    )


def _grouped(low: Lowering, ids: Tensor, tokens: Count, experts: int) -> tuple[Tensor, Tensor]:
    """The chunks and the order of a routing, computed once for all products that use it."""
    if ids not in low.expert_groups:
        pairs = tokens.times(ids.columns)
        name = f"{ids.buffer}[{ids.start}:{ids.stop}]"
        chunks = low.new(f"{name}.chunks", _most_chunks(pairs, experts) + 1, CHUNK_WORDS)
        order = low.new(f"{name}.order", 2, pairs.most)
        low.expert_groups[ids] = chunks, order
        low.add(
            "expert_group",
            ids=ids,
            starts=low.new(f"{name}.starts", 1, experts),
            chunks=chunks,
            order=order,
            tokens=tokens,
            used=ids.columns,
            experts=experts,
            private=pairs.most + experts <= PRIVATE_ELEMENTS,
        )
    return low.expert_groups[ids]


def _most_chunks(pairs: Count, experts: int) -> int:
    """Most chunks of SLOTS pairs, when no chunk has pairs of two experts."""
    return min(pairs.most, experts + pairs.most // SLOTS)


def _product(
    low: Lowering, node: Node, x: str, weight: str, bias: str, y: Tensor, places: int
) -> None:
    """y = x weight[ids]^T + bias[ids], where ``places`` rows of y share a row of x.

    The node may have no operand of the name ``bias``. The experts of a single token are all
    different, so nothing is grouped.
    """
    dims, tokens = low.dims(node), low.count(node)
    used, experts = dims["used"], dims["experts"]
    ids, pairs = low.tensor(node.operands["ids"]), tokens.times(used)
    routing: dict[str, Field] = {
        "ids": ids,
        "used": used,
        "most_chunks": _most_chunks(pairs, experts),
    }
    if tokens.most > 1:
        routing["chunks"], routing["order"] = _grouped(low, ids, tokens, experts)
    source = low.tensor(node.operands[x])
    if bias not in node.operands:
        low.product(source, node.operands[weight], y, pairs, routing, places)
        return
    products = low.new(f"{node.name}.{weight}.products", pairs.most, y.columns)
    low.product(source, node.operands[weight], products, pairs, routing, places)
    biases = low.tensor(node.operands[bias])
    added = {"x": products, "ids": ids, "bias": biases, "y": y}
    low.elementwise("expert_bias", pairs, added, used=used)


def _gate_up(low: Lowering, node: Node) -> None:
    used = low.dims(node)["used"]
    for name in ("gate", "up"):
        y = low.tensor(node.operands[name])
        _product(low, node, "x", f"{name}_weight", f"{name}_bias", y, used)


def _swiglu(low: Lowering, node: Node) -> None:
    pairs = low.count(node).times(low.dims(node)["used"])
    low.elementwise("swiglu", pairs, low.tensors(node), **node.params)


def _down_acc(low: Lowering, node: Node) -> None:
    dims, tokens = low.dims(node), low.count(node)
    used, hidden = dims["used"], dims["hidden"]
    products = low.new(f"{node.name}.products", tokens.times(used).most, hidden)
    _product(low, node, "x", "down_weight", "bias", products, 1)
    names = ("ids", "weights", "expert_scale", "residual", "y")
    tensors = {name: low.tensor(node.operands[name]) for name in names if name in node.operands}
    low.add("expert_sum", tensors, products=products, tokens=tokens, width=hidden, used=used)


def _shared_expert(low: Lowering, node: Node) -> None:
    dims, tokens = low.dims(node), low.count(node)
    width, hidden = dims["width"], dims["hidden"]
    x, residual, y = (low.tensor(node.operands[name]) for name in ("x", "residual", "y"))
    gate, up, gated = (
        low.new(f"{node.name}.{name}", tokens.most, width) for name in ("gate", "up", "gated")
    )
    router = None
    if "router_weight" in node.operands:
        router = low.new(f"{node.name}.router", tokens.most, 1)
        low.add(
            "matmul",
            NO_EXPERTS,
            x=x,
            weight=low.tensor(node.operands["router_weight"]),
            y=router,
            tokens=tokens,
            rows=1,
            columns=hidden,
            places=0,
            dtype=F32,
            matrix=False,
        )
    low.product(x, node.operands["gate_weight"], gate, tokens)
    low.product(x, node.operands["up_weight"], up, tokens)
    low.elementwise("swiglu", tokens, {"gate": gate, "up": up, "y": gated}, activation=0)
    down = low.new(f"{node.name}.down", tokens.most, hidden)
    low.product(gated, node.operands["down_weight"], down, tokens)
    low.add("gated_add", residual=residual, gate=router, x=down, y=y, tokens=tokens, width=hidden)


EXPERT_RULES: Mapping[Opcode, Callable[[Lowering, Node], None]] = MappingProxyType(
    {
        Opcode.MOE_GATE_TOPK: _gate_topk,
        Opcode.MOE_GATE_UP: _gate_up,
        Opcode.MOE_SWIGLU: _swiglu,
        Opcode.MOE_DOWN_ACC: _down_acc,
        Opcode.SHARED_EXPERT: _shared_expert,
    }
)
"""The lowering of each opcode."""
