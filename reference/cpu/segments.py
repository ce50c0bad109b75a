"""The tile kernels behind :mod:`reference.cpu.matmul`, one per storage class.

Every kernel computes ``total[t, r]`` for all tokens and the rows of one tile. Intermediates are
``[segments or blocks, tokens, rows]``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from contract.arithmetic import SEGMENT, SPAN
from contract.arrays import Floats, Ints
from contract.dtypes import StorageClass
from reference.cpu.threads import Scratch
from reference.cpu.weights import RowTile, Scales, by_address
from reference.exact.activation import Activation, quantize_activation

DIGIT_RADIX = 64
BLOCK = 32
SEGMENT_BLOCKS = SEGMENT // BLOCK
SPAN_SEGMENTS = SPAN // SEGMENT
SCRATCH_ELEMENTS = 72 << 10
"""Elements of one intermediate array. In shorter arrays threads wait for the interpreter lock
longer than they compute; longer ones exceed the second-level cache."""
EXPANDED_ELEMENTS = 192 << 10
"""Weights converted to binary32 at a time."""
FEW_SUMS = 2 * SCRATCH_ELEMENTS
"""Most block sums for which all segments of a product are finished in one pass."""

_scratch = Scratch()


class PreparedActivation:
    """Activations f32[T, K] in the forms the kernels read; several weights share one object."""

    def __init__(self, x: Floats) -> None:
        self.x = x

    def rows(self, rows: NDArray[np.intp]) -> PreparedActivation:
        """The activations of some tokens; what is already quantized is not quantized again."""
        part = PreparedActivation(self.x[rows])
        if "quantized" in self.__dict__:
            part.quantized = Activation(self.quantized.m[rows], self.quantized.scale[rows])
        return part

    @cached_property
    def quantized(self) -> Activation:
        """Rule R5's integers and scales."""
        return quantize_activation(self.x)

    @cached_property
    def m(self) -> Floats:
        """The integers, f32[T, K]."""
        return self.quantized.m.astype(np.float32)

    @cached_property
    def blocks(self) -> Floats:
        """The integers of every block, a view f32[K/32, T, 32] of ``m``."""
        return self.m.reshape(len(self.x), -1, BLOCK).transpose(1, 0, 2)

    @cached_property
    def block_sums(self) -> Floats:
        """Sums of m over every 32 elements by block index in the segment, f32[8, n_segments, T, 1].

        A short last segment has sums of 0 for the blocks it lacks."""
        tokens = len(self.x)
        sums = self.quantized.m.reshape(tokens, -1, BLOCK).sum(axis=-1, dtype=np.int32)
        return by_address(sums.T)[..., None]

    @cached_property
    def scale(self) -> Floats:
        """The scales 2^(E-10), f32[n_segments, T, 1]."""
        return np.ascontiguousarray(self.quantized.scale.T)[..., None]

    @cached_property
    def _digits(self) -> Ints:
        high = (self.quantized.m + DIGIT_RADIX // 2) >> 6
        return np.stack([high, self.quantized.m - DIGIT_RADIX * high], axis=1)

    @cached_property
    def digits(self) -> Floats:
        """Rows 2t and 2t+1 hold token t's hi and lo, m = 64*hi + lo: f32[n_segments, 2T, 256]."""
        digits = self._digits.reshape(2 * len(self.x), -1, SEGMENT).astype(np.float32)
        return digits.transpose(1, 0, 2)

    @cached_property
    def half_digit_sums(self) -> Floats:
        """Sums of the digits over every 16 elements, f32[n_segments, 2T, 16]."""
        shape = (2 * len(self.x), -1, 2 * SEGMENT_BLOCKS, BLOCK // 2)
        sums: Ints = self._digits.reshape(shape).sum(axis=-1, dtype=np.int32)
        return sums.astype(np.float32).transpose(1, 0, 2)

    @cached_property
    def digit_sums(self) -> Floats:
        """Sums of the digits over every 32 elements, f32[n_segments, 2T, 8]."""
        return self.half_digit_sums[..., 0::2] + self.half_digit_sums[..., 1::2]

    def quantize_for(self, storage: StorageClass) -> None:
        """Compute every form this storage class reads, so that threads only read them."""
        if storage is StorageClass.INTEGER32:
            _ = self.blocks, self.block_sums, self.scale
        elif storage is StorageClass.SUPERBLOCK:
            _ = self.m, self.digits, self.digit_sums, self.scale


@np.errstate(over="ignore", invalid="ignore")
def integer32_tile(tile: RowTile, activation: PreparedActivation, total: Floats) -> None:
    """Rule R5 for blocks of 32: t_b = d_b*S_b (+ mn_b*M_b), folded from the left."""
    columns, rows = tile.plane.shape
    if total.size * columns <= FEW_SUMS * BLOCK:
        sums = integer32_sums(columns, total.shape)
        integer32_block_sums(tile, activation, sums)
        integer32_finish(tile.scales, activation, sums, total)
        return
    step = max(1, SCRATCH_ELEMENTS // rows)
    span = _scratch.take("span", total.shape)
    for token in range(0, len(total), step):
        at = slice(token, min(token + step, len(total)))
        for segment in range(-(-columns // SEGMENT)):
            value = _segment_by_blocks(tile, activation, segment, at)
            np.multiply(value, activation.scale[segment, at], out=value)
            _accumulate(value[None], segment, columns, total[at], span[at])


def _segment_by_blocks(
    tile: RowTile, activation: PreparedActivation, segment: int, at: slice
) -> Floats:
    """A segment's values before scaling, [T, R], for many tokens: one block at a time."""
    columns, rows = tile.plane.shape
    shape = (at.stop - at.start, rows)
    value = _scratch.take("value", shape)
    stop = min((segment + 1) * SEGMENT, columns)
    for index, first in enumerate(range(segment * SEGMENT, stop, BLOCK)):
        k = slice(first, first + BLOCK)
        terms = _scratch.take("terms", shape) if index else value
        np.matmul(activation.m[at, k], _widen(tile.plane[k], np.float32), out=terms)
        np.multiply(terms, tile.scales.scale[index, segment], out=terms)
        if tile.scales.minimum.size:
            product = _scratch.take("minima", shape)
            sums = activation.block_sums[index, segment, at]
            np.multiply(sums, tile.scales.minimum[index, segment], out=product)
            np.add(terms, product, out=terms)
        if index:
            np.add(value, terms, out=value)
    return value


def integer32_sums(columns: int, shape: tuple[int, int]) -> Floats:
    """Scratch for the block sums of few tokens: f32[8, n_segments, T, R]."""
    return _scratch.take("sums", (SEGMENT_BLOCKS, -(-columns // SEGMENT), *shape))


def integer32_block_sums(tile: RowTile, activation: PreparedActivation, sums: Floats) -> None:
    """Fill ``sums`` [8, n_segments, T, R] with sum q*m; blocks a short segment lacks get +0."""
    columns, rows = tile.plane.shape
    blocks = activation.blocks
    by_segment = sums.swapaxes(0, 1)
    whole = columns // SEGMENT
    piece = max(1, EXPANDED_ELEMENTS // (SEGMENT * rows))
    for start in range(0, whole, piece):
        stop = min(start + piece, whole)
        m = blocks[start * SEGMENT_BLOCKS : stop * SEGMENT_BLOCKS]
        m = m.reshape(stop - start, SEGMENT_BLOCKS, *m.shape[1:])
        plane = _widen(tile.plane[start * SEGMENT : stop * SEGMENT], np.float32)
        plane = plane.reshape(stop - start, SEGMENT_BLOCKS, BLOCK, rows)
        np.matmul(m, plane, out=by_segment[start:stop])
    if whole < len(by_segment):
        plane = _widen(tile.plane[whole * SEGMENT :], np.float32).reshape(-1, BLOCK, rows)
        np.matmul(blocks[whole * SEGMENT_BLOCKS :], plane, out=by_segment[whole, : len(plane)])
        by_segment[whole, len(plane) :] = 0


@np.errstate(over="ignore", invalid="ignore")
def integer32_finish(
    scales: Scales, activation: PreparedActivation, sums: Floats, total: Floats
) -> None:
    """Compute the product from block sums, with the same operations as block by block."""
    np.multiply(sums, scales.scale, out=sums)
    if scales.minimum.size:
        product = _scratch.take("minima", sums.shape)
        np.multiply(activation.block_sums, scales.minimum, out=product)
        np.add(sums, product, out=sums)
    value = sums[0]
    for term in sums[1:]:
        np.add(value, term, out=value)
    np.multiply(value, activation.scale, out=value)
    columns = activation.x.shape[1]
    _accumulate(value, 0, columns, total, _scratch.take("span", total.shape))


def _widen(plane: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    """A scratch copy of stored weights as binary32 or binary64."""
    widened = _scratch.take(dtype.__name__, plane.shape, dtype)
    np.copyto(widened, plane)
    return widened


@np.errstate(over="ignore", invalid="ignore")
def super_block_tile(tile: RowTile, activation: PreparedActivation, total: Floats) -> None:
    """Rule R5 for super-blocks: (d*float(J) - dmin*float(P)) * scale."""
    columns, rows = tile.plane.shape
    tokens = len(total)
    step = max(1, min(tokens, SCRATCH_ELEMENTS // rows))
    group = max(1, SCRATCH_ELEMENTS // (2 * step * rows))
    n_segments = columns // SEGMENT
    span = _scratch.take("span", total.shape)
    for token in range(0, tokens, step):
        at = slice(token, min(token + step, tokens))
        for first in range(0, n_segments, group):
            segments = slice(first, min(first + group, n_segments))
            value = _super_block_values(tile, activation, segments, at)
            np.multiply(value, activation.scale[segments, at], out=value)
            _accumulate(value, first, columns, total[at], span[at])


def _super_block_values(
    tile: RowTile, activation: PreparedActivation, segments: slice, at: slice
) -> Floats:
    """d*float(J) - dmin*float(P), [segments, T, R]."""
    digits = slice(2 * at.start, 2 * at.stop)
    k = slice(segments.start * SEGMENT, segments.stop * SEGMENT)
    if tile.wide:
        value = _wide_sums(activation.m[at, k], tile.plane[k])
    else:
        shape = (segments.stop - segments.start, 2 * (at.stop - at.start), tile.plane.shape[1])
        sums = _scratch.take("sums", shape)
        _digit_sums(activation.digits[segments, digits], tile.plane[k], sums)
        value = _join_digits(sums)
    _scale_super_blocks(value, tile.scales, activation, segments, digits)
    return value


def _scale_super_blocks(
    value: Floats, scales: Scales, activation: PreparedActivation, segments: slice, digits: slice
) -> None:
    """Turn float(J) [segments, T, R] into d*float(J) - dmin*float(P), in place."""
    np.multiply(value, scales.scale[segments], out=value)
    if scales.sub_minimum.size:
        per_block = scales.sub_minimum.shape[1] == SEGMENT_BLOCKS
        sums = activation.digit_sums if per_block else activation.half_digit_sums
        sums = sums[segments, digits]
        shape = (*sums.shape[:2], value.shape[-1])
        product = _scratch.take("minima", shape)
        np.matmul(sums, scales.sub_minimum[segments], out=product)
        product = _join_digits(product)
        np.multiply(product, scales.minimum[segments], out=product)
        np.subtract(value, product, out=value)


def super_block_sums(columns: int, shape: tuple[int, int]) -> Floats:
    """Scratch for the digit sums of few tokens: f32[n_segments, 2T, R]."""
    tokens, rows = shape
    return _scratch.take("sums", (columns // SEGMENT, 2 * tokens, rows))


def super_block_digit_sums(tile: RowTile, activation: PreparedActivation, sums: Floats) -> None:
    """Fill ``sums`` [n_segments, 2T, R] of a tile that is not wide."""
    _digit_sums(activation.digits, tile.plane, sums)


@np.errstate(over="ignore", invalid="ignore")
def super_block_finish(
    scales: Scales, activation: PreparedActivation, sums: Floats, total: Floats
) -> None:
    """Compute the product from digit sums."""
    value = _join_digits(sums)
    _scale_super_blocks(value, scales, activation, slice(None), slice(None))
    np.multiply(value, activation.scale, out=value)
    columns = activation.x.shape[1]
    _accumulate(value, 0, columns, total, _scratch.take("span", total.shape))


def _digit_sums(digits: Floats, plane: np.ndarray, sums: Floats) -> None:
    """Digits [n, 2T, 256] times a plane [256*n, R] into ``sums`` [n, 2T, R], exactly."""
    rows = plane.shape[1]
    piece = max(1, EXPANDED_ELEMENTS // (SEGMENT * rows))
    for first in range(0, len(sums), piece):
        last = first + piece
        weights = _widen(plane[first * SEGMENT : last * SEGMENT], np.float32)
        np.matmul(digits[first:last], weights.reshape(-1, SEGMENT, rows), out=sums[first:last])


def _join_digits(sums: Floats) -> Floats:
    """float(64*hi + lo) of interleaved exact digit sums: the product is exact, the sum rounds."""
    high: Floats = sums[:, 0::2]
    low: Floats = sums[:, 1::2]
    np.multiply(high, np.float32(DIGIT_RADIX), out=high)
    np.add(high, low, out=high)
    return high


def _wide_sums(m: Floats, plane: np.ndarray) -> Floats:
    """float(sum of m*w) [n, T, R], for m [T, 256*n], in binary64: exact, and rounded once."""
    rows = plane.shape[1]
    weights = _widen(plane, np.float64).reshape(-1, SEGMENT, rows)
    exact = m.astype(np.float64).reshape(len(m), -1, SEGMENT).transpose(1, 0, 2)
    products: NDArray[np.float64] = np.matmul(exact, weights)
    return products.astype(np.float32)


@np.errstate(over="ignore", invalid="ignore")
def float_tile(tile: RowTile, activation: PreparedActivation, total: Floats) -> None:
    """Rule R4: rounded products, folded in halves of 256."""
    columns = len(tile.plane)
    span = _scratch.take("span", total.shape)
    for start in range(0, columns, SEGMENT):
        plane = tile.plane[start : start + SEGMENT]
        products = _scratch.take("products", plane.shape)
        for token in range(len(total)):
            at = slice(token, token + 1)
            weights = activation.x[token, start : start + SEGMENT, None]
            np.multiply(plane, weights, out=products)
            half, length = SEGMENT // 2, len(plane)
            while half:
                if length > half:
                    upper = products[half:length]
                    np.add(products[: len(upper)], upper, out=products[: len(upper)])
                    length = half
                half //= 2
            _accumulate(products[None, :1], start // SEGMENT, columns, total[at], span[at])


def _accumulate(values: Floats, first: int, columns: int, total: Floats, span: Floats) -> None:
    """Rule R3: add segment values [segments, T, R], the first of which is segment ``first``.

    The first span is added up in ``total`` itself; every later one in ``span`` until it is
    complete."""
    last_segment = -(-columns // SEGMENT) - 1
    for segment, value in enumerate(values, first):
        target = total if segment < SPAN_SEGMENTS else span
        if segment % SPAN_SEGMENTS == 0:
            np.copyto(target, value)
        else:
            np.add(target, value, out=target)
        complete = segment % SPAN_SEGMENTS == SPAN_SEGMENTS - 1 or segment == last_segment
        if complete and target is span:
            np.add(total, span, out=total)


TILE_KERNELS = {
    StorageClass.INTEGER32: integer32_tile,
    StorageClass.SUPERBLOCK: super_block_tile,
    StorageClass.FLOAT: float_tile,
}
"""The kernel that computes one tile completely."""


@dataclass(frozen=True, slots=True)
class FewTokens:
    """The functions of a product of few tokens: exact sums per tile, then one pass over all
    rows."""

    scratch: Callable[[int, tuple[int, int]], Floats]
    sums: Callable[[RowTile, PreparedActivation, Floats], None]
    finish: Callable[[Scales, PreparedActivation, Floats, Floats], None]


FEW_TOKENS = {
    StorageClass.INTEGER32: FewTokens(integer32_sums, integer32_block_sums, integer32_finish),
    StorageClass.SUPERBLOCK: FewTokens(
        super_block_sums, super_block_digit_sums, super_block_finish
    ),
}
