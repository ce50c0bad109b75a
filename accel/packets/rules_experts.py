"""Which ops the mixture-of-experts opcodes become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from accel.packets.grid import SLOTS
from accel.packets.lowering import ANY, COLUMNS, ROWS, Lowering, cheap
from accel.packets.step import Op, Tensor
from contract.dtypes import F32, StorageClass
from contract.ir.nodes import Node, View
from contract.opcodes import Opcode

CHUNK_WORDS = 3
"""int32 words of the CHUNK record of ``kernels/matmul_experts.h``."""


def _gate_topk(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    tokens, experts, used = dims["tokens"], dims["experts"], dims["used"]
    x, logits, ids, weights = (
        low.tensor(node.operands[name]) for name in ("x", "logits", "ids", "weights")
    )
    low.product(x, node.operands["gate_weight"], logits, tokens)
    low.add(
        Op(
            "expert_topk",
            (logits, low.new(f"{node.name}.p", tokens, experts + used), ids, weights),
            (ROWS,) * 4,
            (1, 2, 3),
            (tokens, experts, used),
            private=cheap(tokens, experts),
        )
    )


def _grouped(low: Lowering, ids: Tensor, tokens: int, experts: int) -> tuple[Tensor, Tensor]:
    """The chunks and the order of a routing, made once for all products that follow it."""
    if ids not in low.expert_groups:
        pairs = tokens * ids.columns
        name = f"{ids.buffer}[{ids.start}:{ids.stop}]"
        chunks = low.new(f"{name}.chunks", _most_chunks(pairs, experts) + 1, CHUNK_WORDS)
        order = low.new(f"{name}.order", 2, pairs)
        low.expert_groups[ids] = chunks, order
        low.add(
            Op(
                "expert_group",
                (ids, low.new(f"{name}.starts", 1, experts), chunks, order),
                (ANY,) * 4,
                (1, 2, 3),
                (tokens, ids.columns, experts),
                private=cheap(1, pairs + experts),
            )
        )
    return low.expert_groups[ids]


def _most_chunks(pairs: int, experts: int) -> int:
    """Chunks of at most SLOTS pairs, those of every expert apart."""
    return min(pairs, experts + pairs // SLOTS)


def _product(
    low: Lowering,
    x: Tensor,
    places: int,
    weight: View,
    ids: Tensor,
    y: Tensor,
    dims: Mapping[str, int],
) -> None:
    """y = x weight[ids]^T, where ``places`` rows of y share a row of x.

    The experts of a single token are all different, so there is nothing to group.
    """
    tokens, used, experts = dims["tokens"], dims["used"], dims["experts"]
    pairs = tokens * used
    dtype = low.dtype(weight)
    inputs: tuple[Tensor | None, ...] = (x, None, None)
    if dtype.storage is not StorageClass.FLOAT:
        inputs = low.quantized(x, pairs // places)
    groups: tuple[Tensor | None, ...] = (None, None)
    if tokens > 1:
        groups = _grouped(low, ids, tokens, experts)
    low.add(
        Op(
            "matmul",
            (*inputs, low.stored(weight), y, ids, *groups),
            (ANY, ANY, ANY, ANY, COLUMNS, ANY, ANY, ANY),
            (4,),
            (pairs, y.columns, x.columns, places, used, _most_chunks(pairs, experts)),
            dtype=dtype,
            matrix=3,
        )
    )


def _gate_up(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    x, ids = low.tensor(node.operands["x"]), low.tensor(node.operands["ids"])
    for name in ("gate", "up"):
        y = low.tensor(node.operands[name])
        _product(low, x, dims["used"], node.operands[f"{name}_weight"], ids, y, dims)


def _swiglu(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    tensors = [low.tensor(node.operands[name]) for name in ("gate", "up", "y")]
    rows, activation = dims["tokens"] * dims["used"], int(node.params["activation"])
    low.elementwise("swiglu", tensors, rows, (activation,))


def _down_acc(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    tokens, used, hidden = dims["tokens"], dims["used"], dims["hidden"]
    x, ids, weights, y = (low.tensor(node.operands[name]) for name in ("x", "ids", "weights", "y"))
    products = low.new(f"{node.name}.products", tokens * used, hidden)
    _product(low, x, 1, node.operands["down_weight"], ids, products, dims)
    expert_scale, residual = (
        low.tensor(node.operands[name]) if name in node.operands else None
        for name in ("expert_scale", "residual")
    )
    low.add(
        Op(
            "expert_sum",
            (products, ids, weights, expert_scale, residual, y),
            (COLUMNS, ANY, ANY, ANY, COLUMNS, COLUMNS),
            (5,),
            (tokens, hidden, used),
        )
    )


def _shared_expert(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    tokens, width, hidden = dims["tokens"], dims["width"], dims["hidden"]
    x, residual, y = (low.tensor(node.operands[name]) for name in ("x", "residual", "y"))
    gate, up, gated = (
        low.new(f"{node.name}.{name}", tokens, width) for name in ("gate", "up", "gated")
    )
    router = None
    if "router_weight" in node.operands:
        router = low.new(f"{node.name}.router", tokens, 1)
        weight = low.tensor(node.operands["router_weight"])
        low.add(
            Op(
                "matmul",
                (x, None, None, weight, router),
                (ANY, ANY, ANY, ANY, COLUMNS),
                (4,),
                (tokens, 1, hidden),
                dtype=F32,
            )
        )
    low.product(x, node.operands["gate_weight"], gate, tokens)
    low.product(x, node.operands["up_weight"], up, tokens)
    low.elementwise("swiglu", (gate, up, gated), tokens)
    down = low.new(f"{node.name}.down", tokens, hidden)
    low.product(gated, node.operands["down_weight"], down, tokens)
    low.add(
        Op(
            "gated_add",
            (residual, router, down, y),
            (COLUMNS, ANY, COLUMNS, COLUMNS),
            (3,),
            (tokens, hidden),
        )
    )


EXPERT_RULES: Mapping[Opcode, Callable[[Lowering, Node], None]] = MappingProxyType(
    {
        Opcode.MOE_GATE_TOPK: _gate_topk,
        Opcode.MOE_GATE_UP: _gate_up,
        Opcode.MOE_SWIGLU: _swiglu,
        Opcode.MOE_DOWN_ACC: _down_acc,
        Opcode.SHARED_EXPERT: _shared_expert,
    }
)
"""What each opcode becomes."""
