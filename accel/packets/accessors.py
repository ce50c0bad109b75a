"""Generates the C text by which kernels read a packet's fields by name, from the table of ops."""

from __future__ import annotations

from collections.abc import Iterable

from accel.packets.device_op import DeviceOp, DeviceOperand
from accel.packets.ops import NUMBERS, OPS
from accel.packets.packet import CONSTANTS

HEADER = """\
// Made from accel/packets/ops.py. OPEN(name) declares `op`: the operands of a packet as typed
// pointers, 0 where absent, <operand>_stride, and the sizes and reals by name.
#define OPEN(name) const name##_fields op = open_##name(memory, packet)
"""


def packet_constants() -> str:
    """``#define`` lines of the numbers that packets and kernels share; they precede
    ``packet.h``."""
    return "".join(f"#define {name} {_literal(value)}\n" for name, value in CONSTANTS.items())


def packet_accessors(ops: Iterable[DeviceOp] = OPS) -> str:
    """The struct ``name_fields`` and the function ``open_name`` of every op; they follow the
    headers that define the types."""
    return HEADER + "".join(map(_accessor, ops))


def op_list(names: Iterable[str]) -> str:
    """``FOR_EACH_OP(X)``: X(number, name) for each op."""
    cases = " ".join(f"X({NUMBERS[name]}, {name})" for name in names)
    return f"#define FOR_EACH_OP(X) {cases}\n"


def _literal(value: int) -> str:
    return f"{value:#x}ul" if value >> 32 else str(value)


def _accessor(op: DeviceOp) -> str:
    fields = [f"    {_pointer(o)}{o.name};\n    ulong {o.name}_stride;" for o in op.operands]
    fields += [f"    uint {name};" for name in op.sizes]
    fields += [f"    float {name};" for name in op.reals]
    loads = [_load(index, operand) for index, operand in enumerate(op.operands)]
    loads += [f"op.{op.sizes[0]} = count_of(memory, packet);"]
    loads += [f"op.{name} = packet->size[{i}];" for i, name in enumerate(op.sizes) if i]
    loads += [f"op.{name} = packet->real[{i}];" for i, name in enumerate(op.reals)]
    return (
        "typedef struct {\n" + "\n".join(fields) + f"\n}} {op.name}_fields;\n"
        f"INLINE {op.name}_fields open_{op.name}(MEMORY memory, const GLOBAL PACKET *packet) {{\n"
        f"    {op.name}_fields op;\n    " + "\n    ".join(loads) + "\n    return op;\n}\n"
    )


def _pointer(operand: DeviceOperand) -> str:
    const = "" if operand.written else "const "
    return f"{const}GLOBAL {operand.element} *"


def _load(index: int, operand: DeviceOperand) -> str:
    pointer = f"({_pointer(operand)})at(memory, packet->operand[{index}])"
    if operand.optional:
        pointer = f"packet->operand[{index}] == ABSENT ? 0 : {pointer}"
    return f"op.{operand.name} = {pointer}; op.{operand.name}_stride = packet->stride[{index}];"
