"""MOE_DOWN_ACC: the down projection of every expert a token uses, and their weighted sum."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats, Ints
from reference.matrix import Matrix
from reference.ops.moe_gate_up import expert_products, with_bias


def moe_down_acc(
    *,
    x: Floats,
    down_weight: Matrix,
    ids: Ints,
    weights: Floats,
    bias: Floats | None = None,
    expert_scale: Floats | None = None,
    residual: Floats | None = None,
) -> Floats:
    """y = residual (+0 when absent), then
    y += weights[e] * ((x[e] down[ids[e]]^T + bias[ids[e]]) * scale[ids[e]]).

    The experts are added in the order of ``ids`` (rule R7). x is [tokens, used, width],
    down_weight [experts, hidden, width], bias [experts, hidden], ids and weights [tokens, used],
    expert_scale [experts], residual and the result [tokens, hidden]."""
    products = expert_products(down_weight, x.reshape(-1, x.shape[-1]), ids)
    return weighted_sum(with_bias(products, bias, ids), ids, weights, expert_scale, residual)


def weighted_sum(
    products: Floats,
    ids: Ints,
    weights: Floats,
    expert_scale: Floats | None,
    residual: Floats | None,
) -> Floats:
    """Add the experts' products [tokens, used, hidden] in order, as ``moe_down_acc`` defines."""
    if expert_scale is not None:
        products = products * expert_scale[ids][..., None]
    y = np.zeros_like(products[:, 0]) if residual is None else residual
    for rank in range(ids.shape[1]):
        y = y + weights[:, rank, None] * products[:, rank]
    return y
