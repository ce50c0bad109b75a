"""Decodes machine code of gfx12 and gfx11: encodings, opcodes, operands.

After AMD's "RDNA4 Instruction Set Architecture Reference Guide", chapter 16, and that of RDNA3,
chapter 15. Encodings of images, buffers, scratch memory, flat addresses and dual issue are missing,
because kernels have none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from importlib import resources
from types import MappingProxyType

from contract.errors import CodecError
from contract.kernel import GpuTarget

LITERAL = 255
VCC, TTMP, NULL, M0, EXEC, SCC = 106, 108, 124, 125, 126, 253
FIRST_VGPR = 256
SGPRS = 128
"""Numbers of scalar registers, including VCC, those of the trap handler, and EXEC."""
INLINE_FLOATS = (
    *(0x3F000000, 0xBF000000, 0x3F800000, 0xBF800000, 0x40000000, 0xC0000000),
    *(0x40800000, 0xC0800000, 0x3E22F983),
)
"""Constants 240 to 248 as binary32: +-0.5, 1, 2, 4 and 1 / (2 pi)."""
LITERAL_AFTER = ("s_fmaak_f32", "s_fmamk_f32", "v_fmaak_f32", "v_fmamk_f32")
SHORT_ONLY = frozenset(
    f"v_{name}"
    for name in (
        *("fmamk_f32", "fmaak_f32", "fmamk_f16", "fmaak_f16", "pk_fmac_f16", "readfirstlane_b32"),
        *("mov_b16", "swap_b32", "swaprel_b32", "permlane64_b32"),
    )
)
"""Instructions of VOP1 and VOP2 that VOP3 lacks."""
CARRYING = frozenset(
    f"v_{name}"
    for name in (
        *("add_co_u32", "sub_co_u32", "subrev_co_u32", "mad_co_u64_u32", "mad_co_i64_i32"),
        *("add_co_ci_u32", "sub_co_ci_u32", "subrev_co_ci_u32", "div_scale_f32", "div_scale_f64"),
        *("mad_u64_u32", "mad_i64_i32"),
    )
)
"""Instructions of VOP3 with a second, scalar result in the bits of others' modifiers."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """One format of instruction words: the bits that identify it, and its fields by (first bit,
    bits)."""

    name: str
    mask: int
    match: int
    dwords: int
    fields: Mapping[str, tuple[int, int]]
    sources: tuple[str, ...] = ()


def _encoding(name: str, bits: str, dwords: int, fields: str, sources: str = "") -> Encoding:
    """An encoding; ``bits`` are the leading bits of the first word, ``fields`` lists
    ``name:first:bits``."""
    shift = 32 - len(bits)
    bits_of = {}
    for part in fields.split():
        label, first, count = part.split(":")
        bits_of[label] = int(first), int(count)
    mask, match = ((1 << len(bits)) - 1) << shift, int(bits, 2) << shift
    return Encoding(name, mask, match, dwords, MappingProxyType(bits_of), tuple(sources.split()))


_VOP3_SOURCES = "src0:32:9 src1:41:9 src2:50:9"
_GFX12 = (
    _encoding("SOP1", "101111101", 1, "op:8:8 sdst:16:7 src0:0:8", "src0"),
    _encoding("SOPC", "101111110", 1, "op:16:7 src1:8:8 src0:0:8", "src0 src1"),
    _encoding("SOPP", "101111111", 1, "op:16:7 simm:0:16"),
    _encoding("SOPK", "1011", 1, "op:23:5 sdst:16:7 simm:0:16"),
    _encoding("SOP2", "10", 1, "op:23:7 sdst:16:7 src1:8:8 src0:0:8", "src0 src1"),
    _encoding("SMEM", "111101", 2, "op:13:6 sdata:6:7 sbase:0:6 offset:32:24 soffset:57:7"),
    _encoding("VOP1", "0111111", 1, "op:9:7 vdst:17:8 src0:0:9", "src0"),
    _encoding("VOPC", "0111110", 1, "op:17:8 vsrc1:9:8 src0:0:9", "src0"),
    _encoding("VOP2", "0", 1, "op:25:6 vdst:17:8 vsrc1:9:8 src0:0:9", "src0"),
    _encoding(
        "VOP3",
        "110101",
        2,
        f"op:16:10 clamp:15:1 opsel:11:4 abs:8:3 sdst:8:7 vdst:0:8 omod:59:2 neg:61:3 "
        f"{_VOP3_SOURCES}",
        "src0 src1 src2",
    ),
    _encoding(
        "VOP3P",
        "11001100",
        2,
        f"op:16:7 clamp:15:1 opsel:11:3 opselhi2:14:1 opselhi:59:2 neghi:8:3 vdst:0:8 neg:61:3 "
        f"{_VOP3_SOURCES}",
        "src0 src1 src2",
    ),
    _encoding("DS", "110110", 2, "op:18:8 offset0:0:8 offset1:8:8 addr:32:8 data0:40:8 "
              "data1:48:8 vdst:56:8"),
    _encoding("VGLOBAL", "11101110", 3, "op:14:8 saddr:0:7 vdst:32:8 scope:50:2 th:52:3 "
              "vsrc:55:8 vaddr:64:8 offset:72:24"),
)  # fmt: skip
_OWN_OF_GFX11 = {
    "SMEM": _encoding(
        "SMEM", "111101", 2, "op:18:8 sdata:6:7 sbase:0:6 offset:32:21 soffset:57:7"
    ),
    # Of flat addresses those whose segment is global memory.
    "VGLOBAL": replace(
        _encoding("VGLOBAL", "110111", 2, "op:18:7 offset:0:13 vaddr:32:8 vsrc:40:8 saddr:48:7 "
                  "vdst:56:8"),
        mask=0x3F << 26 | 3 << 16,
        match=0x37 << 26 | 2 << 16,
    ),
}  # fmt: skip
OFFSET_BITS = 24
"""Bits of the offsets of gfx12; shorter ones are extended to this width."""


@dataclass(frozen=True, slots=True, eq=False)
class Isa:
    """A generation of instructions; its opcodes are in ``opcodes_NAME.txt``."""

    name: str
    encodings: tuple[Encoding, ...]


GFX12 = Isa("gfx12", _GFX12)
GFX11 = Isa("gfx11", tuple(_OWN_OF_GFX11.get(e.name, e) for e in _GFX12))
ISAS: Mapping[GpuTarget, Isa] = {GpuTarget.GFX1201: GFX12, GpuTarget.GFX1100: GFX11}
"""Generations of instructions by compilation target."""


def isa_of(target: GpuTarget) -> Isa:
    """The instructions of a target. Raises CodecError for an unknown GPU."""
    if target not in ISAS:
        raise CodecError(f"target {target.name}, not {' or '.join(known.name for known in ISAS)}")
    return ISAS[target]


class Kind(Enum):
    """The kind of an operand."""

    SCALAR = "s"
    VECTOR = "v"
    CONSTANT = "k"


@dataclass(frozen=True, slots=True)
class Operand:
    """A register by number, or the 32 bits of a constant; ``literal`` if it is part of the code."""

    kind: Kind
    value: int
    literal: bool = False


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction at ``address``, ``nbytes`` long, with the bits of its fields.

    ``known`` caches what was derived from it."""

    address: int
    nbytes: int
    encoding: str
    name: str
    fields: Mapping[str, int]
    literal: int | None = None
    known: list[object] = field(default_factory=list, compare=False, repr=False)

    @property
    def end(self) -> int:
        """The address of the next instruction."""
        return self.address + self.nbytes

    @property
    def target(self) -> int:
        """The address a branch jumps to."""
        return self.end + 4 * signed(self.fields["simm"], 16)

    def source(self, field: str) -> Operand:
        """The operand named by a field of 7, 8 or 9 bits. Raises CodecError for a reserved
        number."""
        number = self.fields[field]
        if field in ("vsrc1", "addr", "data0", "data1", "vaddr", "vsrc"):
            return Operand(Kind.VECTOR, number)
        if number >= FIRST_VGPR:
            return Operand(Kind.VECTOR, number - FIRST_VGPR)
        if number == LITERAL:
            assert self.literal is not None
            return Operand(Kind.CONSTANT, self.literal, True)
        if number < SGPRS or number == SCC:
            return Operand(Kind.SCALAR, number)
        if 128 <= number <= 192:
            return Operand(Kind.CONSTANT, number - 128)
        if 193 <= number <= 208:
            return Operand(Kind.CONSTANT, (192 - number) & 0xFFFF_FFFF)
        if 240 <= number < 240 + len(INLINE_FLOATS):
            return Operand(Kind.CONSTANT, INLINE_FLOATS[number - 240])
        raise CodecError(f"{self.name} at {self.address:#x}: source {number} is not supported")


@cache
def opcodes(isa: Isa = GFX12) -> Mapping[tuple[str, int], str]:
    """Mnemonics by encoding and number."""
    text = resources.files("accel").joinpath("amd", "isa", f"opcodes_{isa.name}.txt").read_text()
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    table = {(encoding, int(number, 16)): name for encoding, number, name in rows}
    for encoding, first in (("VOPC", 0), ("VOP2", 0x100), ("VOP1", 0x180)):
        alike = {key: name for key, name in table.items() if key[0] == encoding}
        table |= {
            ("VOP3", first + number): name
            for (_, number), name in alike.items()
            if name not in SHORT_ONLY
        }
    return MappingProxyType(table)


def decode(code: bytes, address: int, isa: Isa = GFX12) -> Instruction:
    """The instruction at byte ``address``. Raises CodecError if there is none or it is unknown."""
    if address + 4 > len(code):
        raise CodecError(f"code at {address:#x}: an instruction goes past the end")
    words = [int.from_bytes(code[address + i : address + i + 4], "little") for i in (0, 4, 8, 12)]
    for encoding in isa.encodings:
        if words[0] & encoding.mask == encoding.match:
            return _decoded(isa, encoding, words, code, address)
    raise CodecError(f"code at {address:#x}: {words[0]:#010x} has an unknown encoding")


def instructions(code: bytes, isa: Isa = GFX12) -> Iterator[Instruction]:
    """All of them, one after the other. Raises what ``decode`` raises."""
    address = 0
    while address < len(code):
        instruction = decode(code, address, isa)
        yield instruction
        address = instruction.end


def signed(value: int, bits: int) -> int:
    """Two's complement."""
    return value - (1 << bits) if value >> (bits - 1) else value


def _decoded(
    isa: Isa, encoding: Encoding, words: list[int], code: bytes, address: int
) -> Instruction:
    whole = sum(word << 32 * i for i, word in enumerate(words[: encoding.dwords]))
    fields = {
        name: whole >> first & ((1 << bits) - 1) for name, (first, bits) in encoding.fields.items()
    }
    if "offset" in fields:
        bits = encoding.fields["offset"][1]
        fields["offset"] = signed(fields["offset"], bits) & (1 << OFFSET_BITS) - 1
    name = opcodes(isa).get((encoding.name, fields["op"]))
    if name is None:
        raise CodecError(f"code at {address:#x}: no {encoding.name} opcode {fields['op']:#x}")
    dwords, literal = encoding.dwords, None
    if name in LITERAL_AFTER or any(fields[source] == LITERAL for source in encoding.sources):
        literal = words[dwords]
        dwords += 1
    if address + 4 * dwords > len(code):
        raise CodecError(f"code at {address:#x}: {name} goes past the end")
    return Instruction(address, 4 * dwords, encoding.name, name, fields, literal)
