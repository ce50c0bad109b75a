"""The record of a device op, which kernels, packets and lowering share."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cached_property

from contract.lazy_dataclass import dataclass


class Split(Enum):
    """How the workers of an op divide a tensor. If two ops divide equal tensors equally, no barrier
    is needed between them."""

    ROWS = "rows"
    COLUMNS = "columns"
    ANY = "any"
    """Any worker may access any element."""


ROWS, COLUMNS, ANY = Split.ROWS, Split.COLUMNS, Split.ANY

Units = Callable[..., int]
"""Computes an op's units of work from its sizes and ``dtype`` (a GGML type id), given by name."""


@dataclass(frozen=True, slots=True)
class DeviceOperand:
    """One operand of a device op. ``element`` is its C type in kernels, ``split`` how the workers
    divide it. ``matrix`` marks a weight that products read in an arranged layout."""

    name: str
    element: str = "float"
    split: Split = ANY
    written: bool = False
    optional: bool = False
    matrix: bool = False


@dataclass(frozen=True)
class DeviceOp:
    """One op: its operands, sizes and reals in the order of the packet.

    The first size is the count, which may grow with the step. ``units`` computes the number of
    units of work; a work-group takes a unit if ``by_groups``, else a work-item. ``by_columns``
    marks an elementwise op that may divide columns instead of rows. ``source`` is the kernel
    file."""

    name: str
    operands: tuple[DeviceOperand, ...]
    sizes: tuple[str, ...]
    reals: tuple[str, ...]
    units: Units
    by_groups: bool
    by_columns: bool
    source: str

    @cached_property
    def written(self) -> tuple[int, ...]:
        """Indices of the results among the operands."""
        return tuple(i for i, operand in enumerate(self.operands) if operand.written)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """The index of each operand by name."""
        return {operand.name: i for i, operand in enumerate(self.operands)}

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """The division of each operand, in operand order."""
        return tuple(operand.split for operand in self.operands)

    @cached_property
    def fields(self) -> frozenset[str]:
        """Names of the operands, sizes and reals."""
        return frozenset((*(operand.name for operand in self.operands), *self.sizes, *self.reals))

    @cached_property
    def matrices(self) -> tuple[int, ...]:
        """Indices of the weights among the operands; most ops have at most one."""
        return tuple(i for i, operand in enumerate(self.operands) if operand.matrix)

    @cached_property
    def matrix(self) -> int | None:
        """The index of the first weight, None without one."""
        return next(iter(self.matrices), None)


def pieces(count: int, size: int) -> int:
    """The number of pieces of at most ``size`` that make up ``count``."""
    return -(-count // size)
