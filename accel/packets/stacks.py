"""Stacked matrices, divided into row groups that are arranged together."""

from __future__ import annotations

import numpy as np

from accel.packets.layouts import LANES
from contract.arrays import Bytes
from contract.dtypes import DType
from contract.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Stack:
    """Stored bytes as uint8[matrices * rows, row_bytes], or as uint8[matrices, rows, row_bytes],
    which need not be contiguous."""

    dtype: DType
    data: Bytes
    rows: int
    group_rows: int = LANES

    @property
    def matrix_groups(self) -> int:
        """Row groups of one matrix."""
        return -(-self.rows // self.group_rows)

    @property
    def matrices(self) -> int:
        """The number of matrices."""
        return len(self.data) // (self.rows if self.data.ndim == 2 else 1)

    @property
    def groups(self) -> int:
        """Row groups of all matrices; each matrix begins a new one."""
        return self.matrices * self.matrix_groups

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return int(self.data.shape[-1]) // self.dtype.block_bytes * self.dtype.block_elements

    def first_row(self, group: int) -> int:
        """The first row of row group ``group``; the number of rows for the one after the last."""
        matrix, inside = divmod(group, self.matrix_groups)
        return matrix * self.rows + inside * self.group_rows

    def parts(self, max_bytes: int) -> list[range]:
        """All groups in order, in parts of at most ``max_bytes`` stored bytes or of one group."""
        stored_bytes = min(self.group_rows, self.rows) * self.data.shape[-1]
        step = max(1, max_bytes // stored_bytes)
        return [range(g, min(g + step, self.groups)) for g in range(0, self.groups, step)]

    def stored_bytes(self, groups: range) -> int:
        """Bytes of the rows of some groups."""
        rows = self.first_row(groups.stop) - self.first_row(groups.start)
        return rows * int(self.data.shape[-1])

    def stored(self, groups: range) -> Bytes:
        """The rows of some groups; a copy if they are not contiguous."""
        first, stop = self.first_row(groups.start), self.first_row(groups.stop)
        if self.data.ndim == 2:
            return self.data[first:stop]
        matrix, row = np.divmod(np.arange(first, stop), self.rows)
        return self.data[matrix, row]
