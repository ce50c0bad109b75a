"""Declarations of device ops, in the short form that the table ``ops`` uses."""

from __future__ import annotations

from accel.packets.device_op import (
    ANY,
    COLUMNS,
    ROWS,
    DeviceOp,
    DeviceOperand,
    Split,
    Units,
    pieces,
)


def _operand(declared: str, split: Split, written: bool = False) -> DeviceOperand:
    """Parses ``name`` or ``element name``; a final ``?`` marks an optional operand."""
    *element, name = declared.split()
    optional = name.endswith("?")
    kind = element[0] if element else "float"
    return DeviceOperand(name.rstrip("?"), kind, split, written, optional)


def rows(*names: str) -> tuple[DeviceOperand, ...]:
    """Operands whose rows are divided among workers, as ``_operand`` reads them."""
    return tuple(_operand(name, ROWS) for name in names)


def columns(*names: str) -> tuple[DeviceOperand, ...]:
    """Operands whose columns are divided among workers."""
    return tuple(_operand(name, COLUMNS) for name in names)


def unsplit(*names: str) -> tuple[DeviceOperand, ...]:
    """Operands of which any worker may read any element."""
    return tuple(_operand(name, ANY) for name in names)


def to_rows(*names: str) -> tuple[DeviceOperand, ...]:
    """Results whose rows are divided among workers."""
    return tuple(_operand(name, ROWS, written=True) for name in names)


def to_columns(*names: str) -> tuple[DeviceOperand, ...]:
    """Results whose columns are divided among workers."""
    return tuple(_operand(name, COLUMNS, written=True) for name in names)


def to_unsplit(*names: str) -> tuple[DeviceOperand, ...]:
    """Results of which any worker may write any element."""
    return tuple(_operand(name, ANY, written=True) for name in names)


def matrix(name: str) -> tuple[DeviceOperand, ...]:
    """Weights that products read in an arranged layout."""
    return (DeviceOperand(name, "uchar", ANY, matrix=True),)


def op(
    name: str,
    *operands: tuple[DeviceOperand, ...],
    sizes: str,
    reals: str = "",
    groups: Units | None = None,
    items: Units | None = None,
    by_columns: bool = False,
    source: str = "",
) -> DeviceOp:
    """An op of the table; without units it has one for each count and 16 elements of its second
    size."""
    names = tuple(sizes.split())
    units = groups or items or (lambda **s: s[names[0]] * pieces(s[names[1]], 16))
    flat = tuple(operand for group in operands for operand in group)
    by_groups = groups is not None
    return DeviceOp(
        name, flat, names, tuple(reals.split()), units, by_groups, by_columns, source or name
    )


def elementwise(name: str, operands: str, sizes: str = "", reals: str = "") -> DeviceOp:
    """An op that computes each element of ``y`` from those of its operands in the same position."""
    sizes = f"tokens width {sizes}"
    parts = rows(*operands.split()), to_rows("y")
    return op(name, *parts, sizes=sizes, reals=reals, by_columns=True)
