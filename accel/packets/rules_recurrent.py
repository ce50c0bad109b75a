"""Lowers the opcodes of recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from accel.packets.lowering import Field, Lowering, cheap
from contract.ir.nodes import Node
from contract.opcodes import Opcode


def _scale_columns(low: Lowering, node: Node) -> None:
    factors = low.dims(node)["factors"]
    low.elementwise("scale_columns", low.count(node), low.tensors(node), factor_count=factors)


def _conv1d(low: Lowering, node: Node) -> None:
    dims = low.dims(node)
    sizes = {name: dims[name] for name in ("channels", "history", "states")}
    low.add("ssm_conv1d", low.tensors(node), sizes, tokens=low.count(node))


def _delta_net(low: Lowering, node: Node) -> None:
    """Two ops: one prepares each token and is divided by tokens, the recurrence is divided by rows
    of the state."""
    dims, tensors, tokens = low.dims(node), low.tensors(node), low.count(node)
    size = dims["state_size"]
    qk = low.new(f"{node.name}.qk", tokens.most, 2 * dims["key_heads"] * size)
    gates = low.new(f"{node.name}.gates", tokens.most, 2 * dims["value_heads"])
    shared: dict[str, Field] = {"x": tensors["x"], "qk": qk, "gates": gates, "tokens": tokens}
    shared |= {name: dims[name] for name in ("key_heads", "value_heads", "state_size")}
    low.add(
        "ssm_delta_inputs",
        shared,
        {name: tensors[name] for name in ("alpha", "beta", "decay", "dt_bias")},
        eps=node.params["eps"],
        query_scale=1.0 / math.sqrt(size),
        private=cheap(tokens, qk.columns),
    )
    results = {name: tensors[name] for name in ("query", "state", "y")}
    sizes = {name: dims[name] for name in ("grouped", "states")}
    low.add("ssm_delta_net", shared, results, sizes)


def _scan(low: Lowering, node: Node) -> None:
    """Two ops: one prepares each token and is divided by tokens, the recurrence is divided by rows
    of the state."""
    dims, tensors, tokens = low.dims(node), low.tensors(node), low.count(node)
    gates = low.new(f"{node.name}.gates", tokens.most, 2 * dims["heads"])
    made = {name: tensors[name] for name in ("dt", "decay", "dt_bias")}
    private = cheap(tokens, gates.columns)
    low.add(
        "ssm_scan_gates", made, gates=gates, tokens=tokens, heads=dims["heads"], private=private
    )
    read = {name: tensors[name] for name in ("x", "skip", "query", "state", "y")}
    sizes = {name: dims[name] for name in ("heads", "groups", "head_dim", "state_size", "states")}
    low.add("ssm_scan", read, sizes, gates=gates, tokens=tokens)


def _gated_norm(low: Lowering, node: Node) -> None:
    dims, tensors, tokens = low.dims(node), low.tensors(node), low.count(node)
    low.add(
        "ssm_gated_norm",
        tensors,
        tokens=tokens,
        heads=dims["heads"],
        width=dims["width"],
        eps=node.params["eps"],
        private=cheap(tokens, tensors["y"].columns),
    )


RECURRENT_RULES: Mapping[Opcode, Callable[[Lowering, Node], None]] = MappingProxyType(
    {
        Opcode.SCALE_COLUMNS: _scale_columns,
        Opcode.SSM_CONV1D: _conv1d,
        Opcode.SSM_DELTA_NET: _delta_net,
        Opcode.SSM_GATED_NORM: _gated_norm,
        Opcode.SSM_SCAN: _scan,
    }
)
"""The lowering of each opcode."""
