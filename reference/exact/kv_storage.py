"""Storage of keys and values in KV pages (rules R1, R6, R13).

The element type of the array of pages tells the storage type. float32 and float16 pages are [pages,
2, 16, kv_heads, head_dim]. uint8 pages have the same axes, but the last one holds the Q8_0 blocks
of a head: 34 bytes for 32 elements, d binary16, then q int8 [32]. I12, I4R and I3R pages are
[pages, kv_heads] of the records that ``i12_page`` and ``coded_page`` describe. Rows of I4R and I3R
are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from contract.arithmetic import BROKEN_ROW, CODED_CHANNELS, KV_ROW_BITS, PAGE_TOKENS
from contract.arrays import Array, Bytes, Floats, Ints
from contract.dtypes import F16, F32, I12, Q8_0, ROTATED_KV, DType
from reference.exact.attention_rows import Rows, power_of_two, row_integers
from reference.exact.coded_rows import CodedRows, coded, decoded, rotated

ELEMENTS: Mapping[DType, np.dtype[Any]] = {
    F32: np.dtype("<f4"),
    F16: np.dtype("<f2"),
    Q8_0: np.dtype(np.uint8),
}
HALF_MAX = np.float32(65504.0)
Q_MAX = np.float32(127.0)
LOW_BITS = 4
"""Low bits of an I12 integer, which are stored apart from its high byte."""


@cache
def i12_page(head_dim: int) -> np.dtype[Any]:
    """The record of 16 positions of one KV head: rule R6's integers m = 16 high + low, and
    exponents.

    A byte of ``low`` holds channel i in its low half and channel i + head_dim / 2 in its high half.
    The positions of a value channel are contiguous. The exponent of a broken row is -128."""
    half = head_dim // 2
    return np.dtype(
        [
            ("k_high", np.int8, (PAGE_TOKENS, head_dim)),
            ("k_low", np.uint8, (PAGE_TOKENS, half)),
            ("v_high", np.int8, (head_dim, PAGE_TOKENS)),
            ("v_low", np.uint8, (half, PAGE_TOKENS)),
            ("k_exponent", np.int8, (PAGE_TOKENS,)),
            ("v_exponent", np.int8, (PAGE_TOKENS,)),
        ]
    )


@cache
def coded_page(dtype: DType, head_dim: int) -> np.dtype[Any]:
    """The record of 16 positions of one KV head: codes, scales and exponents of rule R13.

    A byte of ``code`` holds the low four bits of two channels of a group of 32, i and i + 16, or
    the low two bits of four channels, i, i + 8, i + 16 and i + 24. Codes of 3 and of 5 bits have
    their highest bits in ``top``, those of a group in a little-endian word. The positions of values
    are contiguous. The exponent of a broken row is -128."""
    groups = head_dim // CODED_CHANNELS
    key_bits, value_bits = ROTATED_KV[dtype]
    odd, axes = (
        ("k_top", (PAGE_TOKENS, groups)) if key_bits % 2 else ("v_top", (groups, PAGE_TOKENS))
    )
    return np.dtype(
        [
            ("k_code", np.uint8, (PAGE_TOKENS, key_bits // 2 * head_dim // 4)),
            ("v_code", np.uint8, (value_bits // 2 * head_dim // 4, PAGE_TOKENS)),
            (odd, "<u4", axes),
            ("k_scale", np.uint8, (PAGE_TOKENS, groups)),
            ("v_scale", np.uint8, (groups, PAGE_TOKENS)),
            ("k_exponent", np.int8, (PAGE_TOKENS,)),
            ("v_exponent", np.int8, (PAGE_TOKENS,)),
        ]
    )


def is_rotated(kv: Array) -> bool:
    """Whether pages store rotated rows, so that queries and results of attention are rotated."""
    return kv.dtype.names is not None and "k_code" in kv.dtype.names


def page_view(data: Bytes, dtype: DType, shape: tuple[int, ...]) -> Array:
    """View bytes as pages of ``dtype``; ``shape`` is [pages, 2, 16, kv_heads, head_dim]."""
    pages, _, _, kv_heads, head_dim = shape
    if dtype is I12 or dtype in ROTATED_KV:
        element = i12_page(head_dim) if dtype is I12 else coded_page(dtype, head_dim)
        shape = (pages, kv_heads)
    else:
        element = ELEMENTS[dtype]
        shape = (*shape[:-1], dtype.row_bytes(head_dim) // element.itemsize)
    count = int(np.prod(shape, dtype=np.int64))
    return data.reshape(-1)[: count * element.itemsize].view(element).reshape(shape)


def store(kv: Array, page: Ints, offset: Ints, k: Floats, v: Floats) -> None:
    """Store ``k`` and ``v`` [tokens, kv_heads, head_dim] at each token's page and offset."""
    if kv.dtype.names is None:
        kv[page, 0, offset] = stored(k, kv.dtype)
        kv[page, 1, offset] = stored(v, kv.dtype)
        return
    for side, x in (("k", k), ("v", v)):
        rows = row_integers(rotated(x) if is_rotated(kv) else x, KV_ROW_BITS)
        if is_rotated(kv):
            _store_codes(kv, side, page, offset, rows)
            continue
        low = (rows.m & ((1 << LOW_BITS) - 1)).astype(np.uint8)
        half = low.shape[-1] // 2
        positions = (page, slice(None), offset)
        at = positions if side == "k" else (*positions[:2], slice(None), offset)
        kv[f"{side}_high"][at] = rows.m >> LOW_BITS
        kv[f"{side}_low"][at] = low[..., :half] | low[..., half:] << LOW_BITS
        kv[f"{side}_exponent"][positions] = rows.exponent


def _store_codes(kv: Array, side: str, page: Ints, offset: Ints, rows: Rows) -> None:
    low, has_top = _code_bits(kv, side)
    made = coded(rows.m, low + has_top)
    parts = made.code.reshape(*made.code.shape[:-1], 8 // low, CODED_CHANNELS * low // 8)
    shifts = np.arange(0, 8, low)[:, None]
    octets = np.bitwise_or.reduce((parts & ((1 << low) - 1)) << shifts, axis=-2)
    positions = (page, slice(None), offset)
    at = positions if side == "k" else (*positions[:2], slice(None), offset)
    kv[f"{side}_code"][at] = octets.reshape(*octets.shape[:-2], octets.shape[-2] * octets.shape[-1])
    kv[f"{side}_scale"][at] = made.scale
    kv[f"{side}_exponent"][positions] = rows.exponent
    if has_top:
        top = (made.code >> low).astype(np.uint32) << np.arange(CODED_CHANNELS, dtype=np.uint32)
        kv[f"{side}_top"][at] = np.bitwise_or.reduce(top, axis=-1)


def _code_bits(kv: Array, side: str) -> tuple[int, bool]:
    """The bits of a code that share bytes, and whether it has one more."""
    channels = kv[f"{side}_scale"].size * CODED_CHANNELS
    return kv[f"{side}_code"].size * 8 // channels, f"{side}_top" in (kv.dtype.names or ())


def stored(x: Floats, element: np.dtype[Any]) -> Array:
    """``x`` converted to the elements of float32, float16 or Q8_0 pages; only Q8_0 changes row
    lengths.

    Binary16 rounds to nearest even and saturates, NaN stays NaN. In Q8_0, 32 elements share d =
    binary16(max |x| / 127), saturating, and q = rint(x / d) within +-127, 0 if d is 0; a block
    that holds a NaN or an infinity has d = NaN and q = 0."""
    if element == np.float32:
        return x
    if element == np.uint8:
        return _q8_0_blocks(x)
    return np.clip(x, -HALF_MAX, HALF_MAX).astype(element)


def loaded(kv: Array) -> Floats:
    """The binary32 values of pages, [pages, 2, 16, kv_heads, head_dim]; d q and m 2^e are exact.

    Those of coded pages are rotated."""
    if kv.dtype.names is not None:
        rows = integers(kv)
        unit = np.where(rows.broken, np.nan, power_of_two(rows.exponent - KV_ROW_BITS))
        return rows.m.astype(np.float32) * unit.astype(np.float32)[..., None]
    return loaded_rows(kv)


def integers(kv: Array) -> Rows:
    """Rule R6's integers of pages, [pages, 2, 16, kv_heads, head_dim]."""
    if is_rotated(kv):
        return coded_rows(kv)
    if kv.dtype.names is not None:
        return i12_rows(kv)
    return row_integers(loaded_rows(kv), KV_ROW_BITS)


def loaded_rows(rows: Array) -> Floats:
    """The binary32 values of stored rows of F32, F16 or Q8_0."""
    if rows.dtype != np.uint8:
        return rows.astype(np.float32)
    blocks = rows.reshape(*rows.shape[:-1], rows.shape[-1] // Q8_0.block_bytes, Q8_0.block_bytes)
    d = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
    q = blocks[..., 2:].view(np.int8)
    return (q * d).reshape(*rows.shape[:-1], blocks.shape[-2] * Q8_0.block_elements)


def i12_rows(kv: Array) -> Rows:
    """The integers of I12 pages, [pages, 2, 16, kv_heads, head_dim]."""
    pages, kv_heads = kv.shape
    *_, head_dim = kv["k_high"].shape
    m = np.empty((pages, 2, PAGE_TOKENS, kv_heads, head_dim), np.int32)
    exponent = np.empty(m.shape[:-1], np.int32)
    for index, (side, axes) in enumerate((("k", (0, 2, 1, 3)), ("v", (0, 3, 1, 2)))):
        low = kv[f"{side}_low"].transpose(axes)
        half = head_dim // 2
        m[:, index] = kv[f"{side}_high"].transpose(axes)
        m[:, index] <<= LOW_BITS
        m[:, index, ..., :half] |= low & 0xF
        m[:, index, ..., half:] |= low >> LOW_BITS
        exponent[:, index] = kv[f"{side}_exponent"].transpose(0, 2, 1)
    m[exponent == BROKEN_ROW] = 0
    return Rows(m, exponent)


def coded_rows(kv: Array) -> Rows:
    """The integers of coded pages, [pages, 2, 16, kv_heads, head_dim], of rotated rows."""
    sides = []
    for side, axes in (("k", (0, 2, 1, 3)), ("v", (0, 3, 1, 2))):
        low, has_top = _code_bits(kv, side)
        scale = kv[f"{side}_scale"].transpose(axes).astype(np.int32)
        octets = kv[f"{side}_code"].transpose(axes)
        octets = octets.reshape(*scale.shape, CODED_CHANNELS * low // 8)
        parts = [octets >> shift & ((1 << low) - 1) for shift in range(0, 8, low)]
        code = np.concatenate(parts, axis=-1).astype(np.int32)
        if has_top:
            top = kv[f"{side}_top"].transpose(axes)[..., None]
            bits = top >> np.arange(CODED_CHANNELS, dtype=np.uint32) & 1
            code |= bits.astype(np.int32) << low
        sides.append(decoded(CodedRows(code, scale), low + has_top))
    m = np.stack(sides, axis=1)
    exponents = [kv[f"{side}_exponent"].transpose(0, 2, 1) for side in "kv"]
    exponent = np.stack(exponents, axis=1).astype(np.int32)
    m[exponent == BROKEN_ROW] = 0
    return Rows(m, exponent)


@np.errstate(invalid="ignore", over="ignore")
def _q8_0_blocks(x: Floats) -> Bytes:
    row_bytes = Q8_0.row_bytes(x.shape[-1])
    count = x.shape[-1] // Q8_0.block_elements
    parts = x.reshape(*x.shape[:-1], count, Q8_0.block_elements)
    largest = np.abs(parts).max(axis=-1)
    half = np.clip(largest / Q_MAX, 0, HALF_MAX).astype("<f2")
    half[~np.isfinite(largest)] = np.nan
    d = half.astype(np.float32)[..., None]
    usable = d > 0
    q = np.clip(np.rint(parts / np.where(usable, d, np.float32(1.0))), -Q_MAX, Q_MAX)
    blocks = np.empty((*largest.shape, Q8_0.block_bytes), np.uint8)
    blocks[..., :2] = half[..., None].view(np.uint8)
    blocks[..., 2:] = np.where(usable, q, np.float32(0.0)).astype(np.int8).view(np.uint8)
    return blocks.reshape(*x.shape[:-1], row_bytes)
