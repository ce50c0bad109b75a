"""A weight matrix as stored: a view of its blocks in the model file, never dequantized here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from contract.arrays import Bytes
from contract.dtypes import DType


@dataclass(frozen=True, slots=True)
class Matrix:
    """``shape`` is row-major [..., rows, columns]; ``blocks`` uint8 [all rows, row_bytes]. If it is
    the first rows of a larger matrix, ``whole`` is that."""

    dtype: DType
    shape: tuple[int, ...]
    blocks: Bytes
    whole: Matrix | None = None

    def __post_init__(self) -> None:
        rows = int(np.prod(self.shape[:-1], dtype=object))
        expected = (rows, self.dtype.row_bytes(self.shape[-1]))
        if self.blocks.shape != expected:
            raise ValueError(f"blocks are {self.blocks.shape}, expected {expected}")

    def first_rows(self, rows: int) -> Matrix:
        """The first ``rows`` rows of a single matrix."""
        return Matrix(self.dtype, (rows, self.shape[1]), self.blocks[:rows], self)

    def expert(self, index: int) -> Matrix:
        """The matrix of expert ``index``, a slice of the first axis of a three-dimensional
        weight."""
        _, rows, columns = self.shape
        return Matrix(self.dtype, (rows, columns), self.blocks[index * rows : (index + 1) * rows])
