"""Q3_K: super-blocks of 256 in 110 bytes.

hmask[32] at 0, qs[64] at 32, scales[12] at 96, d binary16 at 108.
value = d*(sc - 32)*(q - 4), one 6-bit sc per 16 elements. The two low bits of q lie in qs as in
Q2_K; the third of element l of the s-th 32 elements is bit s of hmask[l].
"""

from __future__ import annotations

import numpy as np

from contract.dtypes import Q3_K
from reference.quant.bits import (
    pack_bits,
    pack_pairs,
    pack_signed_scales,
    unpack_bits,
    unpack_pairs,
    unpack_signed_scales,
)
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
    """q in -4..3 and sub_scale in -32..31 per 16 elements; no minimum."""
    parts = split_blocks(blocks, Q3_K.block_bytes)
    shape = parts.shape[:2]
    low = unpack_pairs(parts[..., 32:96].reshape(*shape, 2, 32)).reshape(*shape, 8, 32)
    high = unpack_bits(parts[..., :32]).reshape(*shape, 32, 8).swapaxes(-1, -2)
    return SuperBlocks(
        q=flatten((low | high << 2).view(np.int8) - np.int8(4)),
        scale=read_half(parts, 108),
        minimum=None,
        sub_scale=flatten(unpack_signed_scales(parts[..., 96:108]).astype(np.int16)),
        sub_minimum=None,
        sub=16,
    )


def dequantize(blocks: Bytes) -> Float32:
    """uint8[rows, row_bytes] -> f32[rows, K]."""
    return unpack(blocks).values()


@in_row_chunks(Q3_K)
def quantize(values: Float32) -> Bytes:
    """f32[rows, K] -> uint8[rows, row_bytes]; the largest sub-block scale becomes sc - 32 = -32."""
    rows = len(values)
    parts = values.reshape(rows, -1, 16, 16)
    scale = search_symmetric(np.ascontiguousarray(parts.reshape(-1, 16).T), 4)
    d, sc, scaled = signed_super_blocks(parts, scale.reshape(parts.shape[:3]), 32)
    q = np.clip(np.rint(scaled) + 4, 0, 7).astype(np.uint8).reshape(*d.shape, 2, 4, 32)
    out = np.empty((*d.shape, Q3_K.block_bytes), np.uint8)
    high = (q >> 2).reshape(*d.shape, 8, 32).swapaxes(-1, -2)
    out[..., :32] = pack_bits(high)[..., 0]
    out[..., 32:96] = pack_pairs(q & 3).reshape(*d.shape, 64)
    out[..., 96:108] = pack_signed_scales(sc)
    write_half(out, 108, d)
    return out.reshape(rows, -1)


FORMAT = Format(Q3_K, dequantize, quantize, unpack, scale_offsets=(108,))
