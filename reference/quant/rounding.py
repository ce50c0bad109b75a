"""Quantization of values to small integers: one function for each kind of block.

``layouts.py`` names the function of each format. Elements are value = scale * q, and + minimum
where a block has one; q are integers. All operations are elementwise and correctly rounded, and
sums are folded in halves, so a tensor quantizes to the same bytes on every machine. The searches
take [elements of a block, blocks], so that sums over a block run along the slow axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.arrays import Bytes, Floats
from contract.lazy_dataclass import dataclass
from reference.quant.formats import Float16, reciprocal, to_half
from reference.quant.tables import E2M1, Table

SEARCH_STEPS = (-0.8, -0.4, 0.0, 0.4, 0.8)
"""The candidates of a scale search: by how many levels of q they stretch the range of a block."""
EXPONENT_BIAS = 128
"""MXFP4 stores the scale 2^n as the byte n + 128."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Quantized blocks of 32 or 256 elements, before their bits are packed; n blocks a row.

    - ``scale`` [rows, n] is f16, or uint8 exponents for MXFP4.
    - ``q`` is int8 [rows, n, elements], or [rows, n, sub-blocks, elements of a sub-block].
    - ``minimum`` f16[rows, n] is None for formats without one. Super-blocks subtract it.
    - ``sub_scales`` is int8 [rows, n, count]: the scales of a super-block's sub-blocks, followed by
      their minima in formats that have them; None for blocks of 32."""

    scale: Float16 | Bytes
    q: NDArray[np.int8]
    minimum: Float16 | None = None
    sub_scales: NDArray[np.int8] | None = None


def _clipped(values: Floats, low: int, high: int) -> NDArray[np.int8]:
    return np.clip(np.rint(values), low, high).astype(np.int8)


def _largest(values: Floats) -> Floats:
    """The element of largest magnitude along the last axis, the first of equals."""
    index = np.abs(values).argmax(axis=-1, keepdims=True)
    return np.take_along_axis(values, index, axis=-1)[..., 0]


def symmetric_blocks(values: Floats, levels: int) -> Encoded:
    """q in -levels..levels-1 of f32[rows, n, 32]; the largest magnitude becomes q = -levels."""
    scale = to_half(_largest(values) / np.float32(-levels))
    inverse = reciprocal(scale.astype(np.float32))[..., None]
    return Encoded(scale, _clipped(values * inverse, -levels, levels - 1))


def byte_blocks(values: Floats) -> Encoded:
    """q in -127..127 of f32[rows, n, 32]; the largest magnitude becomes q = +-127."""
    scale = to_half(np.abs(values).max(axis=-1) / np.float32(127))
    inverse = reciprocal(scale.astype(np.float32))[..., None]
    return Encoded(scale, _clipped(values * inverse, -127, 127))


def affine_blocks(values: Floats, top: int) -> Encoded:
    """q in 0..top of f32[rows, n, 32]; minimum and maximum become q = 0 and top."""
    lowest = values.min(axis=-1)
    scale = to_half((values.max(axis=-1) - lowest) / np.float32(top))
    minimum = to_half(lowest)
    inverse = reciprocal(scale.astype(np.float32))[..., None]
    offset = values - minimum.astype(np.float32)[..., None]
    return Encoded(scale, _clipped(offset * inverse, 0, top), minimum)


def table_blocks(values: Floats, table: Table) -> Encoded:
    """q in the table for f32[rows, n, 32]; each block's scale is found by a least-squares
    search."""
    scale = to_half(_search(values, search_table, table))
    scaled = values * reciprocal(scale.astype(np.float32))[..., None]
    return Encoded(scale, table.nearest(scaled).astype(np.int8))


def power_blocks(values: Floats) -> Encoded:
    """q in the table E2M1 of f32[rows, n, 32]; scales are powers of two, stored as exponents.

    The scale is chosen so that the largest magnitude lies in [8, 16) scales (values above 12 are
    stored as 12) or in [4, 8), whichever has the smaller squared error, the first of equals."""
    exponent = np.frexp(np.abs(values).max(axis=-1))[1] + (EXPONENT_BIAS - 4)
    fine, coarse = np.clip([exponent, exponent + 1], 0, 254).astype(np.uint8)
    q = [E2M1.nearest(values * reciprocal(power_scale(e))[..., None]) for e in (fine, coarse)]
    residuals = [q[n] * power_scale(e)[..., None] - values for n, e in enumerate((fine, coarse))]
    errors = [fold(np.moveaxis(residual * residual, -1, 0)) for residual in residuals]
    better = errors[1] < errors[0]
    chosen = np.where(better[..., None], q[1], q[0])
    return Encoded(np.where(better, coarse, fine), chosen.astype(np.int8))


def power_scale(exponents: Bytes) -> Floats:
    """The scales that MXFP4 stores as exponents e: f32 2^(e - 128), and 0 for e = 0 and 1 (rule
    R5). The exponent field of the binary32 is max(e - 1, 0)."""
    field = np.maximum(exponents, 1).astype(np.uint32) - np.uint32(1)
    return (field << np.uint32(23)).view(np.float32)


def affine_super_blocks(values: Floats, sub_elements: int, top: int, sub_top: int = 63) -> Encoded:
    """q in 0..top of f32[rows, n, 256]; each sub-block of ``sub_elements`` has a scale and a
    minimum in 0..sub_top.

    A search gives these scales and minima; they are rounded so that the largest of a super-block
    becomes sub_top. q is then computed with the rounded ones."""
    values = values.reshape(*values.shape[:2], 256 // sub_elements, sub_elements)
    scale, minimum = _search(values, search_affine, top)
    depth = -minimum
    d = to_half(scale.max(axis=-1) / np.float32(sub_top))
    dmin = to_half(depth.max(axis=-1) / np.float32(sub_top))
    d32, dmin32 = d.astype(np.float32)[..., None], dmin.astype(np.float32)[..., None]
    sc = np.clip(np.rint(scale * reciprocal(d32)), 0, sub_top)
    mn = np.clip(np.rint(depth * reciprocal(dmin32)), 0, sub_top)
    offset = values + (dmin32 * mn)[..., None]
    q = _clipped(offset * reciprocal(d32 * sc)[..., None], 0, top)
    return Encoded(d, q, dmin, np.concatenate([sc, mn], axis=-1).astype(np.int8))


def signed_super_blocks(
    values: Floats, sub_elements: int, sub_levels: int, levels: int | Table
) -> Encoded:
    """q of f32[rows, n, 256], in -levels..levels-1 or in the table; each sub-block of
    ``sub_elements`` has a scale and no minimum.

    A search gives these scales; they are rounded to -sub_levels..sub_levels-1 so that the one of
    largest magnitude becomes -sub_levels. q is then computed with the rounded ones."""
    values = values.reshape(*values.shape[:2], 256 // sub_elements, sub_elements)
    search = search_table if isinstance(levels, Table) else search_symmetric
    scale = _search(values, search, levels)
    d = to_half(_largest(scale) / np.float32(-sub_levels))
    d32 = d.astype(np.float32)[..., None]
    sc = _clipped(scale * reciprocal(d32), -sub_levels, sub_levels - 1)
    scaled = values * reciprocal(d32 * sc)[..., None]
    if isinstance(levels, Table):
        return Encoded(d, levels.nearest(scaled).astype(np.int8), sub_scales=sc)
    return Encoded(d, _clipped(scaled, -levels, levels - 1), sub_scales=sc)


def _search(values: Floats, search: Callable[..., Any], *options: Any) -> Any:
    """What ``search`` returns for the blocks f32[..., elements]: f32[...], or a stack of those."""
    *shape, elements = values.shape
    result = search(np.ascontiguousarray(values.reshape(math.prod(shape), elements).T), *options)
    return np.reshape(result, (*np.shape(result)[:-1], *shape))


def fold(values: Floats) -> Floats:
    """Sum over the first axis, a power of two long, in halves."""
    half = values.shape[0] // 2
    while half:
        values = values[:half] + values[half : 2 * half]
        half //= 2
    total: Floats = values[0]
    return total


def search_affine(x: Floats, top: int) -> tuple[Floats, Floats]:
    """Scales >= 0 and minima <= 0, f32[n], for x f32[elements, n] ~ scale*q + minimum, q in 0..top.

    Each stretched range gives integers q, and these give a least-squares scale and minimum; the
    pair with the smallest squared error is chosen, the first of equals."""
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


def search_symmetric(x: Floats, levels: int) -> Floats:
    """Signed scales f32[n] for x f32[elements, n] ~ scale*q, q in -levels..levels-1.

    Candidates are computed and compared as in :func:`search_affine`."""

    def nearest(scaled: Floats) -> Floats:
        return np.clip(np.rint(scaled), -levels, levels - 1)

    return _search_signed(x, [np.float32(-levels - step) for step in SEARCH_STEPS], nearest)


def search_table(x: Floats, table: Table) -> Floats:
    """Signed scales f32[n] for x f32[elements, n] ~ scale*q, q in the table.

    Each candidate scales the element of largest magnitude to near the table's first value."""
    gap = float(table.sorted_values[1] - table.sorted_values[0])
    extremes = [table.sorted_values[0] - np.float32(step * gap) for step in SEARCH_STEPS]
    return _search_signed(x, extremes, table.nearest)


def _search_signed(
    x: Floats, extremes: Sequence[np.float32], nearest: Callable[[Floats], Floats]
) -> Floats:
    """Scales f32[n] of x f32[elements, n]. Each candidate scales the element of largest magnitude
    to one of ``extremes``; ``nearest`` rounds scaled elements to q."""
    index = np.abs(x).argmax(axis=0, keepdims=True)
    inverse_largest = reciprocal(np.take_along_axis(x, index, axis=0)[0])
    best_error = np.full(x.shape[1], np.inf, np.float32)
    best_scale = np.zeros(x.shape[1], np.float32)
    for extreme in extremes:
        q = nearest(x * (extreme * inverse_largest))
        scale = fold(x * q) * reciprocal(fold(q * q))
        residual = scale * q - x
        error = fold(residual * residual)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
    return best_scale
