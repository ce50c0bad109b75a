"""How stored matrices are arranged for the products: once, when they are uploaded.

``kernels/lanes_layout.h`` describes the layout of quantized matrices: 16 rows side by side, one in
each lane of a vector. It holds the same bits as the model file, plus at most 15 rows of zeros and
48 bytes a row group. Float matrices stay as they are.
"""

from __future__ import annotations

from enum import IntEnum

from contract.dtypes import (
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q4_1,
    Q4_K,
    Q5_1,
    Q5_K,
    DType,
    StorageClass,
)

LANES = 16
VECTOR_BYTES = 64

TWO_HEADER_WORDS = frozenset((Q2_K, Q4_1, Q5_1, Q4_K, Q5_K, IQ4_XS))
"""Formats with two 16-bit words a block in the header; MXFP4 has one byte there, others a word."""


class WeightLayout(IntEnum):
    """What ``packet->layout`` tells the kernel about a weight's bytes."""

    STORED = 0
    """Rows of blocks exactly as the model file holds them."""
    LANES = 1
    """Groups of 16 rows, as ``kernels/lanes_layout.h`` describes."""
    UNITS = 2
    """Operands of tensor cores, as ``accel/cuda/kernels/units.h`` describes."""


def arranged_bytes(dtype: DType, rows: int, columns: int) -> int:
    """Bytes of such a matrix once arranged, 0 where it stays as stored."""
    if dtype.storage is StorageClass.FLOAT:
        return 0
    return -(-rows // LANES) * group_bytes(dtype, columns)


def header_bytes(dtype: DType, columns: int) -> int:
    """Bytes of a row group's scales and minima, whole vectors."""
    units = columns // dtype.block_elements
    return -(-units * _unit_bytes(dtype) * LANES // VECTOR_BYTES) * VECTOR_BYTES


def group_bytes(dtype: DType, columns: int) -> int:
    """Bytes of 16 rows."""
    units = columns // dtype.block_elements
    rest = dtype.block_bytes - _unit_bytes(dtype)
    return header_bytes(dtype, columns) + units * rest * LANES


def _unit_bytes(dtype: DType) -> int:
    """Bytes a block has in the header."""
    if dtype == MXFP4:
        return 1
    return 4 if dtype in TWO_HEADER_WORDS else 2
