"""How a KV page keeps a value: binary32, binary16 or Q8_0 blocks (rules R1 and R6).

An array of pages says by its elements how it stores: float32, float16, or uint8 for rows of Q8_0
blocks, 34 bytes for 32 elements: d binary16, then q int8[32].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import Q8_0

HALF_MAX = np.float32(65504.0)
Q_MAX = np.float32(127.0)


def stored(x: NDArray[np.float32], element: np.dtype[Any]) -> NDArray[Any]:
    """``x`` as pages of ``element`` keep it; rows become longer or shorter only as Q8_0.

    Binary16 rounds to nearest even and saturates, NaN stays NaN. In Q8_0, 32 elements share
    d = binary16(max |x| / 127), saturating, and q = rint(x / d) within +-127, 0 where d is 0; a
    block that holds a NaN or an infinity has d = NaN and q = 0.
    """
    if element == np.float32:
        return x
    if element == np.uint8:
        return _q8_0_blocks(x)
    return np.clip(x, -HALF_MAX, HALF_MAX).astype(element)


def loaded(rows: NDArray[Any]) -> NDArray[np.float32]:
    """The values of stored rows; d q is exact in binary32."""
    if rows.dtype != np.uint8:
        return rows.astype(np.float32)
    blocks = rows.reshape(*rows.shape[:-1], rows.shape[-1] // Q8_0.block_bytes, Q8_0.block_bytes)
    d = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
    q = blocks[..., 2:].view(np.int8)
    return (q * d).reshape(*rows.shape[:-1], blocks.shape[-2] * Q8_0.block_elements)


@np.errstate(invalid="ignore", over="ignore")
def _q8_0_blocks(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    row_bytes = Q8_0.row_bytes(x.shape[-1])
    count = x.shape[-1] // Q8_0.block_elements
    parts = x.reshape(*x.shape[:-1], count, Q8_0.block_elements)
    most = np.abs(parts).max(axis=-1)
    half = np.clip(most / Q_MAX, 0, HALF_MAX).astype("<f2")
    half[~np.isfinite(most)] = np.nan
    d = half.astype(np.float32)[..., None]
    usable = d > 0
    q = np.clip(np.rint(parts / np.where(usable, d, np.float32(1.0))), -Q_MAX, Q_MAX)
    blocks = np.empty((*most.shape, Q8_0.block_bytes), np.uint8)
    blocks[..., :2] = half[..., None].view(np.uint8)
    blocks[..., 2:] = np.where(usable, q, np.float32(0.0)).astype(np.int8).view(np.uint8)
    return blocks.reshape(*x.shape[:-1], row_bytes)
