"""Rows of the opcode table: activations times stored matrices."""

from __future__ import annotations

from collections.abc import Mapping

from contract.opcodes import Opcode
from contract.ops.common import EPS, HEADS, NORM_FLOPS, operands, product
from contract.spec import Dim, OpSpec, Scalar, Work


def _qkv_flops(work: Work) -> int:
    outputs = work["q_width"] + 2 * work["kv_width"]
    return work["tokens"] * work["hidden"] * (NORM_FLOPS + 2 * outputs)


def _gate_up_flops(work: Work) -> int:
    return work["tokens"] * work["hidden"] * (NORM_FLOPS + 4 * work["width"])


def _head_widths(dims: Mapping[str, Dim], params: Mapping[str, Scalar]) -> str | None:
    names = ("x_width", "inner", "outputs", "y_width", "rest_width")
    sizes = [size for name in names if isinstance(size := dims.get(name, 0), int)]
    if len(sizes) < len(names):
        return "channels of heads are numbers, not symbols"
    x, inner, outputs, y, rest = sizes
    if inner > x:
        return f"a head of x has {x} channels, of which {inner} are multiplied"
    if rest + outputs != y:
        return f"a head of y has {y} channels, expected {rest} + {outputs}"
    return None


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
        Opcode.HEAD_PRODUCT,
        operands(
            "x[tokens, heads*x_width], rest[tokens, heads*rest_width]?, "
            "weight weight[matrices, outputs, inner], int matrix_of[heads], "
            "*y[tokens, heads*y_width]"
        ),
        (HEADS,),
        rule="R3 R4 R5",
        formula="y[h] = rest[h], then z weight[matrix_of[h]]^T of the last inner channels z of "
        "x[h]; without rest, of the product alone",
        flops=product("tokens", "heads", "outputs", "inner"),
        constraint=_head_widths,
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
