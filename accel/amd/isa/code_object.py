"""Converts a code object of clang to a ``.zrt`` kernel: ELF64 for AMD GPUs, code object version 5.

It reads what a launcher needs, see the LLVM user guide for AMDGPU, "Kernel Descriptor": the bytes
of the kernel's symbol in ``.text`` and its descriptor, the symbol ``<name>.kd``. A kernel that
needs anything else is refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from contract.errors import CodecError
from contract.kernel import GpuTarget, KernelHeader

MACHINE = 224
OS_ABI = 0x40
CODE_OBJECT_5 = 3
ARCHITECTURES: Mapping[int, GpuTarget] = {0x4E: GpuTarget.GFX1201, 0x41: GpuTarget.GFX1100}
"""Targets by the low byte of the ELF flags."""

SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
SYMBOL_TABLE, RELOCATIONS, RELOCATIONS_WITH_ADDEND = 2, 9, 4
SIZES_AT, KERNARG_AT, REGISTERS_AT, PROPERTIES_AT = 0, 8, 44, 56
DESCRIPTOR_BYTES = 64

KERNARG_POINTER, WAVE32 = 1 << 3, 1 << 10
PROPERTIES = KERNARG_POINTER | WAVE32
"""A kernel gets the address of its arguments and nothing else, in waves of 32."""
FLOAT_MODE = 0xF0
"""Round to nearest even, keep subnormal numbers."""
LDS_GRANULE = 512
LDS_SIZE_SHIFT = 15
VGPR_GRANULE = 8
SGPRS = 106
"""Scalar registers of every wave."""
ARGUMENT_BYTES = 32
"""scratch, inputs, packets (64 bits each), index and number of groups."""


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    address: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True, slots=True)
class CodeObject:
    """The sections of an ELF file, and (address, size) of its symbols by name."""

    data: bytes
    target: GpuTarget
    sections: tuple[_Section, ...]
    symbols: Mapping[str, tuple[int, int]]

    def at(self, symbol: str) -> bytes:
        """The bytes of a symbol. Raises CodecError."""
        if symbol not in self.symbols:
            raise CodecError(f"code object: no symbol {symbol}")
        address, size = self.symbols[symbol]
        for section in self.sections:
            first = address - section.address
            if section.address and first >= 0 and first + size <= section.size:
                start = section.offset + first
                return self.data[start : start + size]
        raise CodecError(f"code object: symbol {symbol} lies in no section")


def read_code_object(data: bytes) -> CodeObject:
    """Raises CodecError for anything but a linked code object of a known GPU."""
    if len(data) < 64 or data[:6] != b"\x7fELF\x02\x01":
        raise CodecError("code object: not a little-endian ELF64 file")
    (machine,) = struct.unpack_from("<H", data, 18)
    if machine != MACHINE or data[7] != OS_ABI:
        raise CodecError(f"code object: machine {machine}, OS ABI {data[7]:#x}, not an AMD GPU's")
    if data[8] != CODE_OBJECT_5:
        raise CodecError(f"code object: ABI version {data[8]}, not {CODE_OBJECT_5} (version 5)")
    offset, flags = struct.unpack_from("<QI", data, 40)
    if flags & 0xFF not in ARCHITECTURES:
        known = ", ".join(target.name for target in ARCHITECTURES.values())
        raise CodecError(f"code object: architecture {flags & 0xFF:#x} is not one of {known}")
    sections = tuple(_sections(data, offset))
    if any(s.kind in (RELOCATIONS, RELOCATIONS_WITH_ADDEND) and s.size for s in sections):
        raise CodecError("code object: has relocations; a kernel may refer to nothing outside it")
    symbols = dict(_symbols(data, sections))
    return CodeObject(data, ARCHITECTURES[flags & 0xFF], sections, symbols)


def uses_scratch(code: CodeObject, symbol: str) -> bool:
    """Whether a kernel stores registers in scratch memory. Raises CodecError."""
    _, scratch = struct.unpack_from("<II", code.at(f"{symbol}.kd"), SIZES_AT)
    return bool(scratch)


def kernel_of(code: CodeObject, name: str, symbol: str, items: int) -> KernelHeader:
    """The kernel ``symbol`` as a kernel file with name ``name``, in groups of ``items`` items.
    Raises CodecError if it needs what a launch does not give: scratch memory, other arguments,
    waves of 64 or another float mode."""
    descriptor = code.at(f"{symbol}.kd")
    if len(descriptor) != DESCRIPTOR_BYTES:
        raise CodecError(f"{name}: a descriptor of {len(descriptor)} bytes")
    lds, scratch = struct.unpack_from("<II", descriptor, SIZES_AT)
    (arguments,) = struct.unpack_from("<I", descriptor, KERNARG_AT)
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", descriptor, REGISTERS_AT)
    (properties,) = struct.unpack_from("<H", descriptor, PROPERTIES_AT)
    if scratch:
        raise CodecError(f"{name}: {scratch} bytes of scratch memory a lane; use fewer registers")
    if properties != PROPERTIES:
        raise CodecError(f"{name}: properties {properties:#x}, not {PROPERTIES:#x}")
    if arguments != ARGUMENT_BYTES:
        raise CodecError(f"{name}: {arguments} bytes of arguments, not {ARGUMENT_BYTES}")
    if (mode := rsrc1 >> 12 & 0xFF) != FLOAT_MODE:
        raise CodecError(f"{name}: float mode {mode:#x}, not {FLOAT_MODE:#x}")
    return KernelHeader(
        name,
        code.target,
        code.at(symbol),
        push_constant_bytes=ARGUMENT_BYTES,
        subgroup_size=32,
        workgroup_size=(items, 1, 1),
        lds_bytes=lds,
        vgpr_count=((rsrc1 & 63) + 1) * VGPR_GRANULE,
        sgpr_count=SGPRS,
        rsrc1=rsrc1,
        rsrc2=rsrc2 | -(-lds // LDS_GRANULE) << LDS_SIZE_SHIFT,
        rsrc3=rsrc3,
        user_sgpr_count=rsrc2 >> 1 & 31,
    )


def _sections(data: bytes, offset: int) -> Iterator[_Section]:
    size, count, names_at = struct.unpack_from("<HHH", data, 58)
    if size != SECTION.size or offset + size * count > len(data):
        raise CodecError("code object: its section table is damaged")
    rows = [SECTION.unpack_from(data, offset + size * i) for i in range(count)]
    names = rows[names_at][4] if names_at < count else 0
    for name, kind, _, address, start, nbytes, link, *_ in rows:
        yield _Section(_text(data, names + name), kind, address, start, nbytes, link)


def _symbols(data: bytes, sections: tuple[_Section, ...]) -> Iterator[tuple[str, tuple[int, int]]]:
    for section in sections:
        if section.kind != SYMBOL_TABLE:
            continue
        strings = sections[section.link].offset
        table = np.frombuffer(data, np.uint8, section.size, section.offset).tobytes()
        for name, _, _, _, address, size in SYMBOL.iter_unpack(table):
            yield _text(data, strings + name), (address, size)


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(0, start)].decode("ascii", "replace")
