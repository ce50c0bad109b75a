"""Rows of the opcode table: activations times stored matrices."""

from __future__ import annotations

from contract.opcodes import Opcode
from contract.ops.common import EPS, NORM_FLOPS, operands, product
from contract.spec import OpSpec, Work


def _qkv_flops(work: Work) -> int:
    outputs = work["q_width"] + 2 * work["kv_width"]
    return work["tokens"] * work["hidden"] * (NORM_FLOPS + 2 * outputs)


def _gate_up_flops(work: Work) -> int:
    return work["tokens"] * work["hidden"] * (NORM_FLOPS + 4 * work["width"])


PROJECTIONS = (
    OpSpec(
        Opcode.MATMUL,
        operands("x[tokens, inner], weight weight[outputs, inner], *y[tokens, outputs]"),
        (),
        rule="R3 R4 R5",
        formula="y = x weight^T",
        flops=product("tokens", "outputs", "inner"),
    ),
    OpSpec(
        Opcode.RMS_NORM_FUSED_QKV,
        operands(
            "x[tokens, hidden], norm_weight[hidden], weight q_weight[q_width, hidden], "
            "weight k_weight[kv_width, hidden], weight v_weight[kv_width, hidden], "
            "*q[tokens, q_width], *k[tokens, kv_width], *v[tokens, kv_width]"
        ),
        (EPS,),
        rule="R0 R3 R4 R5",
        formula="h = rms_norm(x); q, k, v = h q_weight^T, h k_weight^T, h v_weight^T",
        flops=_qkv_flops,
    ),
    OpSpec(
        Opcode.RMS_NORM_FUSED_MLP_GATE_UP,
        operands(
            "x[tokens, hidden], norm_weight[hidden], weight gate_weight[width, hidden], "
            "weight up_weight[width, hidden], *gate[tokens, width], *up[tokens, width]"
        ),
        (EPS,),
        rule="R0 R3 R4 R5",
        formula="h = rms_norm(x); gate, up = h gate_weight^T, h up_weight^T",
        flops=_gate_up_flops,
    ),
)
