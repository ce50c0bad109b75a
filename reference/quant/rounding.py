"""How values are turned into small integers: shared by the quantizers of all formats.

Only elementwise correctly rounded operations and sums folded in halves are used, so a tensor
quantizes to the same bytes on every machine. Arrays are [elements of a block, blocks]: sums over
a block then run along the slow axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from reference.quant.formats import Bytes, Float32, reciprocal, to_half
from reference.quant.tables import Table

SEARCH_STEPS = (-0.8, -0.4, 0.0, 0.4, 0.8)
"""Steps, in quantization levels, by which a scale search stretches the range of a sub-block."""


def symmetric_blocks(values: Float32, levels: int) -> tuple[NDArray[np.float16], Bytes]:
    """Scales f16[..., n] and q uint8[..., n, 32] in 0..2*levels-1 of f32[..., n, 32].

    value = (q - levels) * scale; the element of largest magnitude becomes -levels exactly.
    """
    place = np.abs(values).argmax(axis=-1, keepdims=True)
    extreme = np.take_along_axis(values, place, axis=-1)[..., 0]
    scale = to_half(extreme / np.float32(-levels))
    inverse = reciprocal(scale.astype(np.float32))[..., None]
    q = np.clip(np.rint(values * inverse) + levels, 0, 2 * levels - 1)
    return scale, q.astype(np.uint8)


def affine_blocks(
    values: Float32, top: int
) -> tuple[NDArray[np.float16], NDArray[np.float16], Bytes]:
    """Scales and minima f16[..., n] and q uint8[..., n, 32] in 0..top of f32[..., n, 32]."""
    lowest = values.min(axis=-1)
    scale = to_half((values.max(axis=-1) - lowest) / np.float32(top))
    minimum = to_half(lowest)
    inverse = reciprocal(scale.astype(np.float32))[..., None]
    offset = values - minimum.astype(np.float32)[..., None]
    q = np.clip(np.rint(offset * inverse), 0, top)
    return scale, minimum, q.astype(np.uint8)


def fold(values: Float32) -> Float32:
    """Sum over the first axis, a power of two long, in halves."""
    half = values.shape[0] // 2
    while half:
        values = values[:half] + values[half : 2 * half]
        half //= 2
    return values[0]


def search_affine(x: Float32, top: int) -> tuple[Float32, Float32]:
    """Scales >= 0 and minima <= 0, f32[n], for x f32[32, n] ~ scale*q + minimum, q in 0..top.

    Each stretched range gives integers q, and q the least-squares scale and minimum; the pair
    with the smallest squared error wins, the first among equals.
    """
    count = np.float32(x.shape[0])
    zero = np.float32(0.0)
    lowest = np.minimum(x.min(axis=0), zero)
    inverse_range = reciprocal(x.max(axis=0) - lowest)
    sum_x = fold(x)
    best_error = np.full(x.shape[1], np.inf, np.float32)
    best_scale, best_minimum = np.zeros_like(lowest), lowest.copy()
    for step in SEARCH_STEPS:
        q = np.clip(np.rint((x - lowest) * (np.float32(top + step) * inverse_range)), 0, top)
        sum_q, sum_qq, sum_xq = fold(q), fold(q * q), fold(x * q)
        determinant = count * sum_qq - sum_q * sum_q
        inverse_determinant = reciprocal(determinant)
        scale = (count * sum_xq - sum_x * sum_q) * inverse_determinant
        minimum = (sum_qq * sum_x - sum_q * sum_xq) * inverse_determinant
        through_zero = (minimum > 0) | (determinant == 0)
        scale = np.where(through_zero, sum_xq * reciprocal(sum_qq), scale)
        minimum = np.where(through_zero, zero, minimum)
        residual = scale * q + minimum - x
        error = fold(residual * residual)
        better = (error < best_error) & (scale > 0)
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_minimum = np.where(better, minimum, best_minimum)
    return best_scale, best_minimum


def search_symmetric(x: Float32, levels: int) -> Float32:
    """Signed scales f32[n] for x f32[sub, n] ~ scale*q, q in -levels..levels-1.

    Candidates are placed and judged as in :func:`search_affine`.
    """

    def nearest(scaled: Float32) -> Float32:
        return np.clip(np.rint(scaled), -levels, levels - 1)

    return _search_signed(x, [np.float32(-levels - step) for step in SEARCH_STEPS], nearest)


def search_table(x: Float32, table: Table) -> Float32:
    """Signed scales f32[n] for x f32[sub, n] ~ scale*q, q in the table.

    The element of largest magnitude is placed near the table's first value.
    """
    gap = float(table.sorted_values[1] - table.sorted_values[0])
    reaches = [table.sorted_values[0] - np.float32(step * gap) for step in SEARCH_STEPS]
    return _search_signed(x, reaches, lambda scaled: table.sorted_values[table.place(scaled)])


def _search_signed(
    x: Float32, reaches: Sequence[np.float32], nearest: Callable[[Float32], Float32]
) -> Float32:
    """Scales f32[n] of x f32[sub, n]: each reach is what the largest magnitude is scaled to."""
    place = np.abs(x).argmax(axis=0, keepdims=True)
    inverse_extreme = reciprocal(np.take_along_axis(x, place, axis=0)[0])
    best_error = np.full(x.shape[1], np.inf, np.float32)
    best_scale = np.zeros(x.shape[1], np.float32)
    for reach in reaches:
        q = nearest(x * (reach * inverse_extreme))
        scale = fold(x * q) * reciprocal(fold(q * q))
        residual = scale * q - x
        error = fold(residual * residual)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
    return best_scale


def affine_super_blocks(
    values: Float32, top: int, sub_top: int = 63
) -> tuple[NDArray[np.float16], NDArray[np.float16], Bytes, Bytes, Bytes]:
    """f32[rows, n, subs, sub] -> d, dmin f16[rows, n]; sc, mn uint8[rows, n, subs]; q.

    The sub-block scales and minima found by search are themselves rounded to 0..sub_top of their
    super-block's largest; q uint8[rows, n, subs, sub] in 0..top is then taken with the rounded
    ones.
    """
    shape = values.shape[:3]
    parts = np.ascontiguousarray(values.reshape(-1, values.shape[3]).T)
    scale, minimum = search_affine(parts, top)
    scale, depth = scale.reshape(shape), -minimum.reshape(shape)
    d = to_half(scale.max(axis=-1) / np.float32(sub_top))
    dmin = to_half(depth.max(axis=-1) / np.float32(sub_top))
    d32, dmin32 = d.astype(np.float32)[..., None], dmin.astype(np.float32)[..., None]
    sc = np.clip(np.rint(scale * reciprocal(d32)), 0, sub_top)
    mn = np.clip(np.rint(depth * reciprocal(dmin32)), 0, sub_top)
    offset = values + (dmin32 * mn)[..., None]
    q = np.clip(np.rint(offset * reciprocal(d32 * sc)[..., None]), 0, top)
    return d, dmin, sc.astype(np.uint8), mn.astype(np.uint8), q.astype(np.uint8)


def signed_super_blocks(
    values: Float32, scale: Float32, levels: int
) -> tuple[NDArray[np.float16], NDArray[np.int8], Float32]:
    """Sub-block scales f32[rows, n, subs] as d f16[rows, n] and sc int8[rows, n, subs].

    sc is in -levels..levels-1 and the largest scale gets sc = -levels exactly. The third result is
    ``values`` f32[rows, n, subs, sub] in units of the rounded scales.
    """
    place = np.abs(scale).argmax(axis=-1, keepdims=True)
    d = to_half(np.take_along_axis(scale, place, axis=-1)[..., 0] / np.float32(-levels))
    d32 = d.astype(np.float32)[..., None]
    sc = np.clip(np.rint(scale * reciprocal(d32)), -levels, levels - 1)
    return d, sc.astype(np.int8), values * reciprocal(d32 * sc)[..., None]
