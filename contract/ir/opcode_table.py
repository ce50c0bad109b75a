"""Prints the opcode table of docs/opcodes.md: ``python -m contract.ir.opcode_table``."""

from __future__ import annotations

from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.spec import Access, Operand, Param

INTRODUCTION = """# Opcodes

Printed by `python -m contract.ir.opcode_table` from the opcode table; do not edit.

Each opcode is defined by the numpy function of its name in `reference/ops/` and by the rules of
[arithmetic.md](arithmetic.md). An operand is `name[dimensions]`, with its storage type if that is
not binary32; `weight` is any type of a model file, and `?` marks one that may be absent. In a node
a dimension name has one value; a ShapeKey fixes `tokens`, `rows`. Records: `contract/records.py`.
"""

COLUMNS = (
    "No.",
    "Opcode",
    "Reads",
    "Updates in place",
    "Writes",
    "Parameters",
    "Rules",
    "Formula",
    "Stages",
)


def markdown_table() -> str:
    """The whole page: an introduction and one row per opcode, by number."""
    lines = [_row(*COLUMNS), _row(*("---" for _ in COLUMNS))]
    for opcode in sorted(Opcode):
        spec = TABLE[opcode]
        by_access = {
            access: "<br>".join(_operand(o) for o in spec.operands if o.access is access)
            for access in Access
        }
        lines.append(
            _row(
                str(int(opcode)),
                f"`{opcode.name}`",
                by_access[Access.READ],
                by_access[Access.UPDATE],
                by_access[Access.WRITE],
                "<br>".join(_param(param) for param in spec.params),
                spec.rule,
                _code(spec.formula),
                (spec.stages.name or "").lower(),
            )
        )
    return INTRODUCTION + "\n" + "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`"


def _operand(operand: Operand) -> str:
    dims = ", ".join(operand.dims)
    mark = "?" if operand.optional else ""
    names = [dtype.name for dtype in operand.dtypes]
    kind = "" if names == ["f32"] else " weight" if len(names) > 2 else f" {' or '.join(names)}"
    return f"`{operand.name}{mark}[{dims}]`{kind}"


def _param(param: Param) -> str:
    default = "" if param.default is None else f" = {param.default:g}"
    return f"`{param.name}: {param.kind.__name__}{default}` {param.unit}"


if __name__ == "__main__":
    print(markdown_table(), end="")
