"""MOE_GATE_UP: the gate and up projections of every expert a token uses."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats, Ints
from reference.matrix import Matrix
from reference.quant.dot import matmul


def moe_gate_up(
    *,
    x: Floats,
    gate_weight: Matrix,
    up_weight: Matrix,
    ids: Ints,
    gate_bias: Floats | None = None,
    up_bias: Floats | None = None,
) -> tuple[Floats, Floats]:
    """gate, up = x W[ids]^T + b[ids].

    x is [tokens, hidden], a weight [experts, width, hidden], a bias [experts, width]. Returns two
    arrays [tokens, used, width]."""
    pairs = np.repeat(x, ids.shape[1], axis=0)
    gate = with_bias(expert_products(gate_weight, pairs, ids), gate_bias, ids)
    return gate, with_bias(expert_products(up_weight, pairs, ids), up_bias, ids)


def with_bias(products: Floats, bias: Floats | None, ids: Ints) -> Floats:
    """products[t, e] + bias[ids[t, e]]; the products alone without a bias."""
    return products if bias is None else products + bias[ids]


def expert_products(weight: Matrix, pairs: Floats, ids: Ints) -> Floats:
    """pairs[i] weight[ids.flat[i]]^T: f32[tokens * used, inner] -> f32[tokens, used, outputs]."""
    flat = ids.reshape(-1)
    products = np.empty((len(flat), weight.shape[1]), np.float32)
    for expert in np.unique(flat):
        chosen = flat == expert
        products[chosen] = matmul(weight.expert(int(expert)).blocks, weight.dtype, pairs[chosen])
    return products.reshape(*ids.shape, weight.shape[1])
