"""Rows of the opcode table: activations times stored matrices."""

from __future__ import annotations

from contract.opcodes import Opcode
from contract.ops.common import (
    EPS,
    NORM_FLOPS,
    NORM_WEIGHT,
    TOKEN_ACTIVATION,
    WRITE,
    activation,
    product,
    weight,
)
from contract.spec import OpSpec, Work


def _qkv_flops(work: Work) -> int:
    outputs = work["q_width"] + 2 * work["kv_width"]
    return work["tokens"] * work["hidden"] * (NORM_FLOPS + 2 * outputs)


def _gate_up_flops(work: Work) -> int:
    return work["tokens"] * work["hidden"] * (NORM_FLOPS + 4 * work["width"])


PROJECTIONS = (
    OpSpec(
        Opcode.MATMUL,
        (
            activation("x", "tokens", "inner"),
            weight("weight", "outputs", "inner"),
            activation("y", "tokens", "outputs", access=WRITE),
        ),
        (),
        rule="R3 R4 R5",
        formula="y = x weight^T",
        flops=product("tokens", "outputs", "inner"),
    ),
    OpSpec(
        Opcode.RMS_NORM_FUSED_QKV,
        (
            TOKEN_ACTIVATION,
            NORM_WEIGHT,
            weight("q_weight", "q_width", "hidden"),
            weight("k_weight", "kv_width", "hidden"),
            weight("v_weight", "kv_width", "hidden"),
            activation("q", "tokens", "q_width", access=WRITE),
            activation("k", "tokens", "kv_width", access=WRITE),
            activation("v", "tokens", "kv_width", access=WRITE),
        ),
        (EPS,),
        rule="R0 R3 R4 R5",
        formula="h = rms_norm(x); q, k, v = h q_weight^T, h k_weight^T, h v_weight^T",
        flops=_qkv_flops,
    ),
    OpSpec(
        Opcode.RMS_NORM_FUSED_MLP_GATE_UP,
        (
            TOKEN_ACTIVATION,
            NORM_WEIGHT,
            weight("gate_weight", "width", "hidden"),
            weight("up_weight", "width", "hidden"),
            activation("gate", "tokens", "width", access=WRITE),
            activation("up", "tokens", "width", access=WRITE),
        ),
        (EPS,),
        rule="R0 R3 R4 R5",
        formula="h = rms_norm(x); gate, up = h gate_weight^T, h up_weight^T",
        flops=_gate_up_flops,
    ),
)
