"""HEAD_PRODUCT: the heads of each row times a matrix of their own."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats, Ints
from reference.matrix import Matrix
from reference.ops.moe_gate_up import expert_products


def head_product(
    *, x: Floats, weight: Matrix, matrix_of: Ints, heads: int, rest: Floats | None = None
) -> Floats:
    """y[t, h] = rest[t, h], then z weight[matrix_of[h]]^T by rules R3 to R5, where z are the last
    ``inner`` channels of x[t, h].

    x is [tokens, heads * x_width], rest [tokens, heads * rest_width] or None for nothing before the
    product, weight [matrices, outputs, inner], matrix_of [heads]. Returns [tokens, heads * y_width]
    with y_width = rest_width + outputs."""
    read = heads_of(x, heads)[..., -weight.shape[-1] :]
    ids = np.broadcast_to(matrix_of, (len(x), heads))
    return joined(rest, expert_products(weight, read.reshape(-1, weight.shape[-1]), ids))


def heads_of(x: Floats, heads: int) -> Floats:
    """x [tokens, heads * width] as [tokens, heads, width]."""
    return x.reshape(len(x), heads, x.shape[1] // heads)


def joined(rest: Floats | None, products: Floats) -> Floats:
    """The rows [tokens, heads * width] of products [tokens, heads, outputs], each head behind its
    channels of ``rest`` if given."""
    tokens, heads, _ = products.shape
    if rest is not None:
        products = np.concatenate((heads_of(rest, heads), products), axis=-1)
    return products.reshape(tokens, heads * products.shape[-1])
