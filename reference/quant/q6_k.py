"""Q6_K: super-blocks of 256 in 210 bytes.

ql[128] at 0, qh[64] at 128, int8 scales[16] at 192, d binary16 at 208.
value = d*sc*(q - 32), one sc per 16 elements. Each half of 128 owns 64 bytes of ql and 32 of qh:
for l = 0..31 the elements l, l+32, l+64, l+96 take their low bits from ql[l] & 15, ql[l+32] & 15,
ql[l] >> 4, ql[l+32] >> 4 and bits 4-5 from the bit pairs 0, 2, 4, 6 of qh[l].
"""

from __future__ import annotations

import numpy as np

from contract.dtypes import Q6_K
from reference.quant.bits import pack_nibbles, pack_pairs, unpack_nibbles, unpack_pairs
from reference.quant.formats import (
    Bytes,
    Float32,
    Format,
    SuperBlocks,
    flatten,
    in_row_chunks,
    read_half,
    split_blocks,
    write_half,
)
from reference.quant.rounding import search_symmetric, signed_super_blocks


def unpack(blocks: Bytes) -> SuperBlocks:
    """q in -32..31 and sub_scale in -128..127 per 16 elements; no minimum."""
    parts = split_blocks(blocks, Q6_K.block_bytes)
    low = unpack_nibbles(parts[..., :128].reshape(*parts.shape[:2], 2, 64))
    low = low.reshape(*parts.shape[:2], 2, 4, 32)
    high = unpack_pairs(parts[..., 128:192].reshape(*parts.shape[:2], 2, 32))
    q = (low | high << 4).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(parts[..., 192:208]).view(np.int8)
    return SuperBlocks(
        q=flatten(q),
        scale=read_half(parts, 208),
        minimum=None,
        sub_scale=flatten(scales.astype(np.int16)),
        sub_minimum=None,
        sub=16,
    )


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, row_bytes] -> f32[rows, K]."""
    return unpack(blocks).values()


@in_row_chunks(Q6_K)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes]; the largest sub-block scale becomes sc = -128."""
    rows = len(values)
    parts = values.reshape(rows, -1, 16, 16)
    scale = search_symmetric(np.ascontiguousarray(parts.reshape(-1, 16).T), 32)
    d, sc, scaled = signed_super_blocks(parts, scale.reshape(parts.shape[:3]), 128)
    q = np.clip(np.rint(scaled) + 32, 0, 63).astype(np.uint8)
    q = q.reshape(*d.shape, 2, 4, 32)
    out = np.empty((*d.shape, Q6_K.block_bytes), np.uint8)
    out[..., :128] = pack_nibbles((q & 15).reshape(*d.shape, 2, 128)).reshape(*d.shape, 128)
    out[..., 128:192] = pack_pairs(q >> 4).reshape(*d.shape, 64)
    out[..., 192:208] = sc.view(np.uint8)
    write_half(out, 208, d)
    return out.reshape(rows, -1)


FORMAT = Format(Q6_K, dequantize, quantize, unpack, scale_offsets=(208,))
