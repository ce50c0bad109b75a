"""MOE_GATE_UP: the gate and up projections of every expert a token uses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.matrix import Matrix
from reference.quant.dot import matmul


def moe_gate_up(
    *,
    x: NDArray[np.float32],
    gate_weight: Matrix,
    up_weight: Matrix,
    ids: NDArray[np.int32],
    gate_bias: NDArray[np.float32] | None = None,
    up_bias: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """gate, up = x W[ids]^T + b[ids].

    x is [tokens, hidden], a weight [experts, width, hidden], a bias [experts, width]. Returns two
    arrays [tokens, used, width]."""
    pairs = np.repeat(x, ids.shape[1], axis=0)
    gate = with_bias(expert_products(gate_weight, pairs, ids), gate_bias, ids)
    return gate, with_bias(expert_products(up_weight, pairs, ids), up_bias, ids)


def with_bias(
    products: NDArray[np.float32], bias: NDArray[np.float32] | None, ids: NDArray[np.int32]
) -> NDArray[np.float32]:
    """products[t, e] + bias[ids[t, e]]; the products alone without a bias."""
    return products if bias is None else products + bias[ids]


def expert_products(
    weight: Matrix, pairs: NDArray[np.float32], ids: NDArray[np.int32]
) -> NDArray[np.float32]:
    """pairs[i] weight[ids.flat[i]]^T: f32[tokens * used, inner] -> f32[tokens, used, outputs]."""
    flat = ids.reshape(-1)
    products = np.empty((len(flat), weight.shape[1]), np.float32)
    for expert in np.unique(flat):
        chosen = flat == expert
        products[chosen] = matmul(weight.expert(int(expert)).blocks, weight.dtype, pairs[chosen])
    return products.reshape(*ids.shape, weight.shape[1])
