"""Lowers the opcodes of recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from accel.packets.lowering import Lowering, Rule, named
from contract.ir.nodes import Node
from contract.opcodes import Opcode


def _scale_columns(low: Lowering, node: Node) -> None:
    low.lower(node, "scale_columns", factor_count=low.dims(node)["factors"], private="y")


def _delta_net(low: Lowering, node: Node) -> None:
    """Two ops: one prepares each token and is divided by tokens, the recurrence is divided by rows
    of the state."""
    dims, tokens = low.dims(node), low.count(node).maximum
    size = dims["state_size"]
    qk = low.new(f"{node.name}.qk", tokens, 2 * dims["key_heads"] * size)
    gates = low.new(f"{node.name}.gates", tokens, 2 * dims["value_heads"])
    scale = 1.0 / math.sqrt(size)
    low.lower(node, "ssm_delta_inputs", qk=qk, gates=gates, query_scale=scale, private="qk")
    low.lower(node, "ssm_delta_net", qk=qk, gates=gates)


def _scan(low: Lowering, node: Node) -> None:
    """Two ops: one prepares each token and is divided by tokens, the recurrence is divided by rows
    of the state."""
    heads = low.dims(node)["heads"]
    gates = low.new(f"{node.name}.gates", low.count(node).maximum, 2 * heads)
    low.lower(node, "ssm_scan_gates", gates=gates, private="gates")
    low.lower(node, "ssm_scan", gates=gates)


RECURRENT_RULES: Mapping[Opcode, Rule] = MappingProxyType(
    {
        Opcode.SCALE_COLUMNS: _scale_columns,
        Opcode.SSM_CONV1D: named("ssm_conv1d"),
        Opcode.SSM_DELTA_NET: _delta_net,
        Opcode.SSM_GATED_NORM: named("ssm_gated_norm", "y"),
        Opcode.SSM_SCAN: _scan,
    }
)
"""The lowering of each opcode."""
