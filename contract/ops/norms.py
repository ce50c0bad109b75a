"""Rows of the opcode table: normalization."""

from __future__ import annotations

from contract.opcodes import Opcode
from contract.ops.common import EPS, NORM_FLOPS, SILU_FLOPS, each, operands
from contract.spec import OpSpec, Param

NORMS = (
    OpSpec(
        Opcode.RMS_NORM,
        operands("x[tokens, groups*width], weight[width]?, *y[tokens, groups*width]"),
        (EPS, Param("groups", int, "heads normed apart", 1, 1)),
        rule="R0 R3 R4",
        formula="r = 1 / sqrt(sum(x*x)/width + eps); y = (x*r)*weight",
        flops=each(NORM_FLOPS, "tokens", "groups", "width"),
    ),
    OpSpec(
        Opcode.RESIDUAL_RMS_NORM,
        operands(
            "x[tokens, hidden], residual[tokens, hidden], norm_weight[hidden], "
            "*sum[tokens, hidden], *y[tokens, hidden]"
        ),
        (EPS,),
        rule="R0 R3 R4",
        formula="sum = residual + x; y = rms_norm(sum)",
        flops=each(NORM_FLOPS + 1, "tokens", "hidden"),
    ),
    OpSpec(
        Opcode.SSM_GATED_NORM,
        operands(
            "x[tokens, heads*width], gate[tokens, heads*width], weight[width], "
            "*y[tokens, heads*width]"
        ),
        (EPS, Param("heads", int, "heads normed apart", minimum=1)),
        rule="R0 R2 R3 R4",
        formula="y = rms_norm(x, weight) * silu(gate), per head",
        flops=each(NORM_FLOPS + SILU_FLOPS + 1, "tokens", "heads", "width"),
    ),
)
