"""Rows of the opcode table: normalization."""

from __future__ import annotations

from contract.opcodes import Opcode
from contract.ops.common import (
    EPS,
    NORM_FLOPS,
    NORM_WEIGHT,
    SILU_FLOPS,
    TOKEN_ACTIVATION,
    WRITE,
    activation,
    each,
)
from contract.spec import OpSpec, Param

NORMS = (
    OpSpec(
        Opcode.RMS_NORM,
        (
            activation("x", "tokens", "groups*width"),
            activation("weight", "width", optional=True),
            activation("y", "tokens", "groups*width", access=WRITE),
        ),
        (EPS, Param("groups", int, "heads normed apart", 1, 1)),
        rule="R0 R3 R4",
        formula="r = 1 / sqrt(sum(x*x)/width + eps); y = (x*r)*weight",
        flops=each(NORM_FLOPS, "tokens", "groups", "width"),
    ),
    OpSpec(
        Opcode.RESIDUAL_RMS_NORM,
        (
            TOKEN_ACTIVATION,
            activation("residual", "tokens", "hidden"),
            NORM_WEIGHT,
            activation("sum", "tokens", "hidden", access=WRITE),
            activation("y", "tokens", "hidden", access=WRITE),
        ),
        (EPS,),
        rule="R0 R3 R4",
        formula="sum = residual + x; y = rms_norm(sum)",
        flops=each(NORM_FLOPS + 1, "tokens", "hidden"),
    ),
    OpSpec(
        Opcode.SSM_GATED_NORM,
        (
            activation("x", "tokens", "heads*width"),
            activation("gate", "tokens", "heads*width"),
            activation("weight", "width"),
            activation("y", "tokens", "heads*width", access=WRITE),
        ),
        (EPS, Param("heads", int, "heads normed apart", minimum=1)),
        rule="R0 R2 R3 R4",
        formula="y = rms_norm(x, weight) * silu(gate), per head",
        flops=each(NORM_FLOPS + SILU_FLOPS + 1, "tokens", "heads", "width"),
    ),
)
