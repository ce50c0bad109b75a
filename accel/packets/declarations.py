"""Parses the short declarations of device ops in the tables ``ops`` and ``fused_ops``."""

from __future__ import annotations

from math import prod

from accel.packets.device_op import DeviceOp, DeviceOperand, Split, Units, pieces


def _operand(declared: str) -> DeviceOperand:
    """Parse ``[rows|columns|matrix] [element] name``; ``*name`` is a result and ``name?`` an
    optional operand. The default element is a float, of a matrix a byte. The first word says how
    the work divides the operand; without it any worker may access any element."""
    *words, name = declared.split()
    matrix = "matrix" in words
    split = next((one for one in Split if one.value in words), Split.ANY)
    words = [word for word in words if word not in ("matrix", split.value)]
    kind = words[0] if words else "uchar" if matrix else "float"
    return DeviceOperand(name.strip("*?"), kind, split, name[0] == "*", name[-1] == "?", matrix)


def product(sizes: str) -> Units:
    """Units of work: the product of the named sizes and numbers, which are separated by blanks."""
    names = [word for word in sizes.split() if not word.isdecimal()]
    factor = prod(int(word) for word in sizes.split() if word.isdecimal())
    return lambda **s: prod((s[name] for name in names), start=factor)


def op(
    name: str,
    operands: str,
    sizes: str,
    reals: str = "",
    *,
    groups: Units | str = "",
    items: str | Units = "",
    by_columns: bool = False,
    source: str = "",
) -> DeviceOp:
    """An op of a table: operands as ``_operand`` parses them, separated by commas; sizes and reals;
    and its units of work, one work-group each (``groups``) or one work-item each (``items``).
    Without units it has a work-item for each count and 16 elements of its second size."""
    names = tuple(sizes.split())
    units = groups or items or (lambda **s: s[names[0]] * pieces(s[names[1]], 16))
    return DeviceOp(
        name,
        tuple(map(_operand, operands.split(","))),
        names,
        tuple(reals.split()),
        product(units) if isinstance(units, str) else units,
        bool(groups),
        by_columns,
        source or name,
    )


def elementwise(name: str, operands: str, sizes: str = "", reals: str = "") -> DeviceOp:
    """An op that computes each element of ``y`` from the elements of its operands at the same
    position."""
    return op(name, f"{operands}, rows *y", f"tokens width {sizes}", reals, by_columns=True)
