"""GGML storage formats: one module per format, and the registry of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from contract.dtypes import DType, StorageClass
from reference.quant import (
    bf16,
    f16,
    f32,
    iq4_nl,
    iq4_xs,
    mxfp4,
    q2_k,
    q3_k,
    q4_0,
    q4_1,
    q4_k,
    q5_0,
    q5_1,
    q5_k,
    q6_k,
    q8_0,
)
from reference.quant.formats import Blocks32, Bytes, Format, SuperBlocks, split_blocks

__all__ = [
    "FORMATS",
    "Blocks32",
    "Format",
    "SuperBlocks",
    "find_nonfinite_scale",
    "moderate_scales",
]

_MODULES = (
    *(f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k),
    *(q2_k, q3_k, iq4_nl, iq4_xs, mxfp4),
)

FORMATS: Mapping[DType, Format] = MappingProxyType(
    {module.FORMAT.dtype: module.FORMAT for module in _MODULES}
)
"""Every format a weight may be stored in."""


def find_nonfinite_scale(dtype: DType, blocks: Bytes) -> tuple[int, int] | None:
    """The first (row, block) whose scale or minimum is NaN or infinite, or None.

    ``blocks`` uint8[rows, row_bytes]. In a float format every element is a block of its own.
    The exponent 255 of MXFP4 is NaN in the standard that defines it.
    """
    stored = FORMATS[dtype]
    if dtype.storage is StorageClass.FLOAT:
        exponent = {"f32": 0x7F80, "f16": 0x7C00, "bf16": 0x7F80}[dtype.name]
        upper = blocks.view("<u2")[:, dtype.block_bytes // 2 - 1 :: dtype.block_bytes // 2]
        broken = upper & exponent == exponent
    else:
        parts = split_blocks(blocks, dtype.block_bytes)
        broken = np.zeros(parts.shape[:2], bool)
        for offset in stored.scale_offsets:
            broken |= parts[..., offset + 1] & 0x7C == 0x7C
        for offset in stored.exponent_offsets:
            broken |= parts[..., offset] == 0xFF
    if not broken.any():
        return None
    row, block = np.unravel_index(int(broken.argmax()), broken.shape)
    return int(row), int(block)


def moderate_scales(dtype: DType, blocks: Bytes) -> None:
    """Change the scales of random blocks, in place, such that every magnitude is below 2.

    ``blocks`` uint8[rows, row_bytes] of a format with scales; every integer stays as it is.
    """
    parts = split_blocks(blocks, dtype.block_bytes)
    for offset in FORMATS[dtype].scale_offsets:
        parts[..., offset + 1] &= 0xBF
    for offset in FORMATS[dtype].exponent_offsets:
        parts[..., offset] = 96 | parts[..., offset] & 31
