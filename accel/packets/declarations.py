"""Declarations of device ops, in the short form that the tables ``ops`` and ``fused_ops`` use."""

from __future__ import annotations

from math import prod

from accel.packets.device_op import DeviceOp, DeviceOperand, Split, Units, pieces


def _operand(declared: str) -> DeviceOperand:
    """Parse ``[rows|columns|matrix] [element] name``, where ``*name`` is a result and ``name?`` an
    operand that may be absent. Elements are floats, of a matrix bytes; without a word for the
    division any worker may access any element."""
    *words, name = declared.split()
    matrix = "matrix" in words
    split = next((one for one in Split if one.value in words), Split.ANY)
    words = [word for word in words if word not in ("matrix", split.value)]
    kind = words[0] if words else "uchar" if matrix else "float"
    return DeviceOperand(name.strip("*?"), kind, split, name[0] == "*", name[-1] == "?", matrix)


def product(sizes: str) -> Units:
    """Units of work that are the product of these sizes and numbers, with blanks between them."""
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
    """An op of a table: its operands as ``_operand`` reads them, with commas between them; its
    sizes and reals; its units of work, for a work-group or a work-item each. Without units it has a
    work-item for each count and 16 elements of its second size."""
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
    """An op that computes each element of ``y`` from those of its operands in the same position."""
    return op(name, f"{operands}, rows *y", f"tokens width {sizes}", reals, by_columns=True)
