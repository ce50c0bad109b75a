"""Generates the text by which kernels read a packet's fields by name, from the table of ops."""

from __future__ import annotations

from accel.packets.device_op import DeviceOp
from accel.packets.packet import BANK_SHIFT, CONSTANTS, PACKET
from contract.dtypes import I12, I32, WEIGHT_DTYPES
from contract.records import LOGIT_BIAS, OUTPUT_EVENT, QUERY_TOKEN, SAMPLING, SLOT, STEP

WORD_TYPES = {"<u4": "uint", "<i4": "int", "<u8": "U64", "<f4": "float"}
GLSL_KEYWORDS = frozenset({"layout"})
"""Field names of PACKET that get the suffix ``_`` because they are keywords."""

RECORDS = {
    "STEP": STEP,
    "QUERY": QUERY_TOKEN,
    "SAMPLING": SAMPLING,
    "BIAS": LOGIT_BIAS,
    "SLOT": SLOT,
    "EVENT": OUTPUT_EVENT,
}
"""Records that kernels read or write, by the prefix of their fields' names."""
MAX_PUSHED_BYTES = 128
"""Bytes of push constants that every Vulkan device supports."""
ABSENT_ADDRESS = "TO_U64(0u)"


def packet_constants() -> str:
    """``#define`` lines of the numbers that packets and kernels share: those of packets, the words
    of records (``QUERY_SLOT``, ``SAMPLING_WORDS``), and the GGML type ids."""
    formats = {dtype.name.upper(): dtype.ggml_id for dtype in (*WEIGHT_DTYPES, I32, I12)}
    own = {"OFFSET_MASK": (1 << BANK_SHIFT) - 1, "PACKET_BYTES": PACKET.itemsize}
    numbers = {name: _literal(value) for name, value in (CONSTANTS | own | _words()).items()}
    # These have no suffix, since GLSL's #if accepts none.
    numbers |= {name: str(value) for name, value in formats.items()}
    return "".join(f"#define {name} {value}\n" for name, value in numbers.items())


def _words() -> dict[str, int]:
    """The offset of each field of each record, and the size of each record, in 32-bit words."""
    words: dict[str, int] = {}
    for prefix, record in RECORDS.items():
        assert record.fields is not None
        words |= {
            f"{prefix}_{name.upper()}": offset // 4
            for name, (_, offset, *_) in record.fields.items()
        }
        words[f"{prefix}_WORDS"] = record.itemsize // 4
    return words


def pushed_counts(op: DeviceOp) -> tuple[int, int, int]:
    """The numbers of operands, sizes and reals of a pushed packet of ``op``."""
    return len(op.operands), len(op.sizes), max(1, len(op.reals))


def pushed_bytes(op: DeviceOp) -> int:
    """Bytes of ``LAUNCH`` of ``vk.h`` with a pushed packet of ``op``."""
    operands, sizes, reals = pushed_counts(op)
    return -(-(8 + 12 * operands + 4 * (sizes + reals + 2)) // 8) * 8


def is_pushed(op: DeviceOp) -> bool:
    """Whether a packet of ``op`` fits into push constants on every device."""
    return pushed_bytes(op) <= MAX_PUSHED_BYTES


def pushed_macros(op: DeviceOp) -> dict[str, int]:
    """The macros of ``vk.h`` for a packet of ``op``."""
    names = "PUSHED_OPERANDS", "PUSHED_SIZES", "PUSHED_REALS"
    counts = dict(zip(names, pushed_counts(op), strict=True))
    return {"PUSHED_PACKET": int(is_pushed(op))} | counts


def packet_struct() -> str:
    """The text of ``PACKET`` for the device."""
    assert PACKET.fields is not None
    fields = []
    for name in PACKET.names or ():
        dtype = PACKET.fields[name][0]
        kind = WORD_TYPES[dtype.base.str]
        count = f"[{dtype.shape[0]}]" if dtype.shape else ""
        fields.append(f"    {kind} {_field(name)}{count};\n")
    return "PACKET_STRUCT {\n" + "".join(fields) + "};\n"


def op_struct(op: DeviceOp) -> str:
    """The text of ``OP`` and ``opened()``: operands as addresses, 0 if absent, strides, sizes
    and reals."""
    fields = [f"    ADDRESS {o.name};\n    uint {o.name}_stride;\n" for o in op.operands]
    fields += [f"    uint {name};\n" for name in op.sizes]
    fields += [f"    float {name};\n" for name in op.reals]
    fields.append("    uint arrangement;\n")
    loads = []
    for index, operand in enumerate(op.operands):
        pointer = f"PACKET_ADDRESS({index})"
        if operand.optional:
            stored = f"PACKET_FIELD(operand[{index}])"
            pointer = f"{stored} == ABSENT ? {ABSENT_ADDRESS} : {pointer}"
        loads.append(f"op.{operand.name} = {pointer};")
        loads.append(f"op.{operand.name}_stride = PACKET_FIELD(stride[{index}]);")
    loads += [f"op.{name} = TO_U32(PACKET_FIELD(size[{i}]));" for i, name in enumerate(op.sizes)]
    loads.append(
        "if (PACKET_FIELD(counted) != 0u) "
        f"op.{op.sizes[0]} *= U32_AT(INPUTS, PACKET_FIELD(counted) - 1u);"
    )
    loads += [f"op.{name} = PACKET_FIELD(real[{i}]);" for i, name in enumerate(op.reals)]
    loads.append(f"op.arrangement = PACKET_FIELD({_field('layout')});")
    return (
        f"STRUCT(OP) {{\n{''.join(fields)}}};\n\n"
        "FN OP opened(LAUNCH_CTX) {\n    LOAD_PACKET;\n    OP op;\n    "
        + "\n    ".join(loads)
        + "\n    return op;\n}\n\n"
        f"#define HAS(address) ((address) != {ABSENT_ADDRESS})\n"
    )


def _field(name: str) -> str:
    return f"{name}_" if name in GLSL_KEYWORDS else name


def _literal(value: int) -> str:
    return f"{value:#x}ul" if value >> 32 else f"{value}u"
