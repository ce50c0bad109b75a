"""The layouts of matrices for products; stored matrices are arranged in one when they are uploaded.

Processors read quantized matrices in lanes, see ``accel/opencl/kernels/lanes_layout.h``: 16 rows in
parallel, one in each lane of a vector. These are the bits of the model file, plus at most 15 rows
of zeros and 48 bytes per row group. Work-groups read planes of 32 rows and 256 columns, see
``accel/kernels/formats.k``: the bits of the file, plus at most 31 rows and 255 columns of zeros,
and two bytes per super-block of Q3_K. Float matrices stay as stored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum

from contract.dtypes import IQ4_XS, MXFP4, Q2_K, Q3_K, Q4_1, Q4_K, Q5_1, Q5_K, DType, StorageClass
from contract.ir.nodes import BufferDecl, BufferKind

LANES = 16
VECTOR_BYTES = 64
TILE_ROWS = 32
UNIT_COLUMNS = 256

TWO_HEADER_WORDS = frozenset((Q2_K, Q4_1, Q5_1, Q4_K, Q5_K, IQ4_XS))
"""Formats whose block header has two 16-bit words. The others have one word, MXFP4 one byte."""


class WeightLayout(IntEnum):
    """The value of ``packet->layout``, by which kernels know the layout of a weight."""

    STORED = 0
    """Rows of blocks as in the model file."""
    LANES = 1
    """Groups of 16 rows, see ``accel/opencl/kernels/lanes_layout.h``."""
    UNITS = 2
    """Operands of tensor cores, see ``accel/cuda/kernels/units.h``."""
    PLANES = 3
    """Tiles of 32 rows, see ``accel/kernels/formats.k``."""


def matrices_of(decl: BufferDecl) -> int:
    """The number of matrices in a buffer: those of a stack, 1 for a single matrix, else 0."""
    if decl.kind is not BufferKind.WEIGHT or len(decl.shape) not in (2, 3):
        return 0
    return int(decl.shape[0]) if len(decl.shape) == 3 else 1


def grouped_bytes(
    decl: BufferDecl, group_rows: int, group_bytes: Callable[[DType, int], int]
) -> int:
    """Bytes of a buffer in groups of ``group_rows`` rows, 0 if it stays as stored.
    ``group_bytes`` gives those of a group from its format and columns."""
    matrices = matrices_of(decl)
    if not matrices or decl.dtype.storage is StorageClass.FLOAT:
        return 0
    rows, columns = (int(dim) for dim in decl.shape[-2:])
    return matrices * -(-rows // group_rows) * group_bytes(decl.dtype, columns)


def lanes_bytes(decl: BufferDecl) -> int:
    """Bytes of a buffer in groups of 16 rows, 0 if it stays as stored."""
    return grouped_bytes(decl, LANES, group_bytes)


def tile_bytes(dtype: DType, columns: int) -> int:
    """Bytes of a tile of 32 rows in planes."""
    row_bytes = 112 if dtype == Q3_K else dtype.row_bytes(UNIT_COLUMNS)
    return -(-columns // UNIT_COLUMNS) * row_bytes * TILE_ROWS


def planes_bytes(decl: BufferDecl) -> int:
    """Bytes of a buffer in planes, 0 if it stays as stored."""
    return grouped_bytes(decl, TILE_ROWS, tile_bytes)


def header_bytes(dtype: DType, columns: int) -> int:
    """Bytes of a row group's scales and minima, a multiple of VECTOR_BYTES."""
    units = columns // dtype.block_elements
    return -(-units * _unit_bytes(dtype) * LANES // VECTOR_BYTES) * VECTOR_BYTES


@functools.cache
def group_bytes(dtype: DType, columns: int) -> int:
    """Bytes of a group of 16 rows."""
    units = columns // dtype.block_elements
    rest = dtype.block_bytes - _unit_bytes(dtype)
    return header_bytes(dtype, columns) + units * rest * LANES


def _unit_bytes(dtype: DType) -> int:
    """Bytes of one block in the header."""
    if dtype == MXFP4:
        return 1
    return 4 if dtype in TWO_HEADER_WORDS else 2
