"""Which ops the opcodes of gated delta-net layers become."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from accel.packets.lowering import ANY, COLUMNS, ROWS, Lowering, cheap
from accel.packets.step import Op, Tensor
from contract.ir.nodes import Node
from contract.opcodes import Opcode


def _operands(low: Lowering, node: Node, *names: str) -> tuple[Tensor, ...]:
    return tuple(low.tensor(node.operands[name]) for name in names)


def _scale_columns(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    operands = _operands(low, node, "x", "factors", "y")
    low.elementwise("scale_columns", operands, dims["tokens"], (dims["factors"],))


def _conv1d(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    low.add(
        Op(
            "ssm_conv1d",
            _operands(low, node, "x", "weight", "query", "state", "y"),
            (COLUMNS, ANY, ANY, ANY, COLUMNS),
            (3, 4),
            (dims["tokens"], dims["channels"], dims["history"]),
        )
    )


def _delta_net(low: Lowering, node: Node) -> None:
    """What each token needs, which tokens are divided for, then the recurrence, divided by rows
    of the state."""
    dims = low.dims(node)
    tokens, key_heads, value_heads, size = (
        dims[name] for name in ("tokens", "key_heads", "value_heads", "state_size")
    )
    x, alpha, beta, decay, dt_bias, query, state, y = _operands(
        low, node, "x", "alpha", "beta", "decay", "dt_bias", "query", "state", "y"
    )
    qk = low.new(f"{node.name}.qk", tokens, 2 * key_heads * size)
    gates = low.new(f"{node.name}.gates", tokens, 2 * value_heads)
    low.add(
        Op(
            "ssm_delta_inputs",
            (x, alpha, beta, decay, dt_bias, qk, gates),
            (ROWS, ROWS, ROWS, ANY, ANY, ROWS, ROWS),
            (5, 6),
            (tokens, key_heads, value_heads, size),
            (node.params["eps"], 1.0 / math.sqrt(size)),
            private=cheap(tokens, qk.columns),
        )
    )
    low.add(
        Op(
            "ssm_delta_net",
            (x, qk, gates, query, state, y),
            (ANY,) * 6,
            (4, 5),
            (tokens, key_heads, value_heads, size, dims["grouped"]),
        )
    )


def _gated_norm(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    x, gate, weight, y = _operands(low, node, "x", "gate", "weight", "y")
    low.add(
        Op(
            "ssm_gated_norm",
            (x, gate, weight, y),
            (ROWS, ROWS, ANY, ROWS),
            (3,),
            (dims["tokens"], dims["heads"], dims["width"]),
            (node.params["eps"],),
            private=cheap(dims["tokens"], y.columns),
        )
    )


RECURRENT_RULES: Mapping[Opcode, Callable[[Lowering, Node], None]] = MappingProxyType(
    {
        Opcode.SCALE_COLUMNS: _scale_columns,
        Opcode.SSM_CONV1D: _conv1d,
        Opcode.SSM_DELTA_NET: _delta_net,
        Opcode.SSM_GATED_NORM: _gated_norm,
    }
)
