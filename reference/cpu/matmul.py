"""Matrix products of the CPU tier: the bits of :mod:`reference.quant.dot`, at BLAS speed.

BLAS may add in any order and fuse multiply-adds, so it is given only sums whose every partial
result is an integer of at most 24 bits: those are exact in binary32 whatever the order.

- 32-blocks: sum |q*m| over a block is at most 32*128*2047 < 2^23. One sgemm over K = 32 per block,
  then d*S, mn*Sm, their sum and the left fold elementwise, each rounded as rule R5 says.
- Super-blocks: the sub-block scale is multiplied into the weights (|sc*q| <= 1953 for Q5_K) and the
  activation is cut in two digits, m = 64*hi + lo with |hi|, |lo| <= 32. One sgemm over K = 256
  gives both digit sums of a segment, at most 1953*32*256 < 2^24 in magnitude, and 64*hi + lo,
  rounded once, is float(J). P likewise. That is 8 elementwise passes per 256 weights where
  per-sub-block sums would need one set for each sub-block, and half the traffic of binary64. In
  Q6_K |sc*q| can reach 4096, in IQ4_XS 4064; whether a tile's digit sums fit is measured when it
  is prepared, and a tile where they do not is multiplied in binary64, exact below 2^53, with one
  rounding.
- Float formats: rounded products folded in halves, elementwise; BLAS cannot follow rule R4.

A weight is cut in tiles of output rows, a tile in groups of segments and the tokens in tiles such
that everything between two passes stays in the second-level cache. A sum that starts from +0 is
started by assignment: the bits are the same up to the sign of zero, which rule R0 leaves open."""

from __future__ import annotations

import numpy as np

from contract.arrays import Floats
from reference.cpu.segments import BLOCK, FEW_SUMS, FEW_TOKENS, TILE_KERNELS, PreparedActivation
from reference.cpu.threads import for_each
from reference.cpu.weights import PreparedWeight, RowTile, prepare_weight

__all__ = ["PreparedActivation", "PreparedWeight", "prepare_weight", "prepared_matmul"]

SINGLE_THREAD_PRODUCTS = 1 << 17
"""Below this many multiplications, waking a second thread costs more than it saves."""


def prepared_matmul(
    weight: PreparedWeight,
    x: Floats | PreparedActivation,
    out: Floats | None = None,
    threads: int | None = None,
) -> Floats:
    """x @ W.T, with the bits of :func:`reference.quant.dot.matmul`.

    x f32[T, columns] -> f32[T, rows], written to ``out`` when given. It uses at most ``threads``
    threads, None for all cores. A token with a NaN or infinity affects no other. Raises ValueError
    when the shapes do not fit."""
    activation = x if isinstance(x, PreparedActivation) else PreparedActivation(x)
    tokens, columns = activation.x.shape
    if columns != weight.columns:
        raise ValueError(f"activations have {columns} columns, the weight {weight.columns}")
    if out is None:
        out = np.empty((tokens, weight.rows), np.float32)
    elif out.shape != (tokens, weight.rows) or out.dtype != np.float32:
        raise ValueError(f"out must be float32 of shape ({tokens}, {weight.rows})")
    if tokens == 0:
        return out
    storage = weight.dtype.storage
    activation.quantize_for(storage)
    products = tokens * weight.rows * columns
    if products < SINGLE_THREAD_PRODUCTS:
        threads = 1
    if products <= FEW_SUMS * BLOCK and storage in FEW_TOKENS and not weight.wide:
        _few_tokens(weight, activation, out, threads)
        return out
    kernel = TILE_KERNELS[storage]

    def compute(tile: RowTile) -> None:
        kernel(tile, activation, out[:, tile.first : tile.last])

    for_each(compute, weight.tiles, threads)
    return out


def _few_tokens(
    weight: PreparedWeight, activation: PreparedActivation, out: Floats, threads: int | None
) -> None:
    # Only the long calls run on several threads. In the many short ones that finish a product,
    # threads would pass the interpreter lock back and forth for longer than the work takes.
    steps = FEW_TOKENS[weight.dtype.storage]
    sums = steps.scratch(weight.columns, out.shape)

    def compute(tile: RowTile) -> None:
        steps.sums(tile, activation, sums[..., tile.first : tile.last])

    for_each(compute, weight.tiles, threads)
    steps.finish(weight.scales, activation, sums, out)
