"""SHARED_EXPERT: the expert that every token uses, scaled by a gate."""

from __future__ import annotations

from contract.arrays import Floats
from reference.exact.elementary import sigmoid
from reference.exact.sums import sum_axis
from reference.matrix import Matrix
from reference.ops.swiglu import swiglu
from reference.quant.dot import matmul


def shared_expert(
    *,
    x: Floats,
    gate_weight: Matrix,
    up_weight: Matrix,
    down_weight: Matrix,
    residual: Floats,
    router_weight: Floats | None = None,
) -> Floats:
    """y = residual + sigmoid(x.router_weight) * ((silu(x gate^T) * (x up^T)) down^T).

    x, residual and the result are [tokens, hidden], router_weight [hidden]; without it there is no
    sigmoid factor. The dot product with the router is summed by rules R3 and R4."""
    gate = matmul(gate_weight.blocks, gate_weight.dtype, x)
    up = matmul(up_weight.blocks, up_weight.dtype, x)
    down = matmul(down_weight.blocks, down_weight.dtype, swiglu(gate=gate, up=up))
    return gated_add(residual, x, router_weight, down)


def gated_add(residual: Floats, x: Floats, router_weight: Floats | None, down: Floats) -> Floats:
    """residual + sigmoid(x.router_weight) * down, [tokens, hidden]."""
    if router_weight is not None:
        down = sigmoid(sum_axis(x * router_weight))[:, None] * down
    return residual + down
