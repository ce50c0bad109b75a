"""Matrix products for the tests of opcodes that contain one: an exact and a binary64 oracle."""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import DType, StorageClass
from reference.matrix import Matrix
from tests.ops.scalar import F, long_sum
from tests.quant.oracle import dot
from tests.quant.samples import random_blocks

Float32 = NDArray[np.float32]


def random_matrix(dtype: DType, rows: int, columns: int, seed: int) -> Matrix:
    """A stored matrix of random bits under moderate scales."""
    return Matrix(dtype, (rows, columns), random_blocks(dtype, rows, columns, seed))


def exact_product(x: Float32, matrix: Matrix) -> list[list[Fraction]]:
    """x W^T: integer formats in rational arithmetic, float formats in scalar binary32."""
    if matrix.dtype.storage is not StorageClass.FLOAT:
        return [[dot(matrix.dtype, row, token) for row in matrix.blocks] for token in x]
    weights = float_values(matrix)
    return [
        [
            Fraction(float(long_sum([F(w * v) for w, v in zip(row, token, strict=True)])))
            for row in weights
        ]
        for token in x
    ]


def float_values(matrix: Matrix) -> Float32:
    """The elements of a float matrix."""
    if matrix.dtype.name == "bf16":
        return (matrix.blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)
    element = {"f32": "<f4", "f16": "<f2"}[matrix.dtype.name]
    return matrix.blocks.view(element).astype(np.float32)


def fractions(y: Float32) -> list[list[Fraction]]:
    """A result as exact numbers, so that == means all bits but the sign of zero."""
    return [[Fraction(float(value)) for value in row] for row in y]
