"""The operands, arithmetic and results of each instruction, from the table ``semantics.txt``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from accel.amd.isa.decode import CARRYING, EXEC, NULL, SCC, VCC, Instruction, Kind, Operand, signed
from contract.errors import CodecError

WIDE = frozenset("UI")
"""Types that take two registers."""
VECTOR_OFFSET = 256
"""Added to the numbers of vector registers where both kinds are numbered together."""

COMPARE = re.compile(r"(v_cmpx?|s_cmp)_(\w+)_([ufi])(16|32|64)$")
COMPARISONS = {
    "eq": "a == b",
    "ne": "a != b",
    "lg": "a != b",
    "neq": "a != b",
    "lt": "a < b",
    "le": "a <= b",
    "gt": "a > b",
    "ge": "a >= b",
    "nlt": "~(a < b)",
    "nle": "~(a <= b)",
    "ngt": "~(a > b)",
    "nge": "~(a >= b)",
    "class": "class_of(a, b)",
}
ORDERED_UNEQUAL = "(a < b) | (a > b)"
"""LG of floats, which is false for NaN."""
SIZES = {"b32": 4, "b64": 8, "b96": 12, "b128": 16, "b256": 32, "b512": 64} | {
    "u8": 1,
    "i8": 1,
    "u16": 2,
    "i16": 2,
    "b8": 1,
    "b16": 2,
}
SCALAR_LOAD = re.compile(r"s_load_(\w+)$")
GLOBAL = re.compile(r"global_(load|store)_(d16_hi_)?([bui]\d+)$")
LOCAL = re.compile(r"ds_(load|store)_(2addr_)?(stride64_)?b(32|64|96|128)$")
BARRIERS = "s_barrier_wait", "s_barrier"
"""Instructions at which a wave waits until all waves of its group have come."""
ALIASES: Mapping[str, str] = {
    "s_add_u32": "s_add_co_u32",
    "s_sub_u32": "s_sub_co_u32",
    "s_add_i32": "s_add_co_i32",
    "s_sub_i32": "s_sub_co_i32",
    "s_addc_u32": "s_add_co_ci_u32",
    "s_subb_u32": "s_sub_co_ci_u32",
    "s_addk_i32": "s_addk_co_i32",
    "v_mad_u64_u32": "v_mad_co_u64_u32",
    "v_max_f32": "v_max_num_f32",
    "v_min_f32": "v_min_num_f32",
}
"""Names of gfx11 for instructions that the table calls by their names of gfx12."""
ATOMIC = re.compile(r"ds_add_(rtn_)?u32$")
MATRIX = "v_wmma_i32_16x16x16_iu8"
MATRIX_DWORDS = 2, 2, 8
"""Registers of its operands, of which the third may be a constant; the result has as many as the
third."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: a letter for the type of each result and source, as the table explains
    them, and an expression for each result. ``keeps`` says that the destination is also read."""

    results: str
    sources: str
    expressions: tuple[str, ...]
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Typed:
    """An operand, and the type it is read or written as."""

    type: str
    operand: Operand

    @property
    def registers(self) -> Iterator[int]:
        """Numbers of all its registers, vector ones from ``VECTOR_OFFSET`` on."""
        null = self.operand.kind is Kind.SCALAR and self.operand.value == NULL
        if self.operand.kind is Kind.CONSTANT or null:
            return
        offset = VECTOR_OFFSET if self.operand.kind is Kind.VECTOR else 0
        for n in range(2 if self.type in WIDE else 1):
            yield offset + self.operand.value + n


@dataclass(frozen=True, slots=True)
class Meaning:
    """An arithmetic instruction: its row, and the operands for the row's types."""

    row: Row
    results: tuple[Typed, ...]
    sources: tuple[Typed, ...]


@dataclass(frozen=True, slots=True)
class Access:
    """The registers that an instruction reads and writes."""

    reads: frozenset[int]
    writes: frozenset[int]


@cache
def table() -> Mapping[str, Row]:
    """Rows by mnemonic."""
    rows = {}
    text = resources.files("accel").joinpath("amd", "isa", "semantics.txt").read_text()
    for line in text.splitlines():
        if line and not line.startswith("#"):
            head, *expressions = (part.strip() for part in line.split(" | "))
            name, results, sources = head.split()
            first, keeps = results.removeprefix("+"), results.startswith("+")
            rows[name] = Row(first, sources, _joined(first, expressions), keeps)
    return MappingProxyType(rows)


def _joined(results: str, parts: list[str]) -> tuple[str, ...]:
    """The expressions of a row; the last ones are results, earlier ones may contain a bitwise
    or."""
    extra = len(parts) - len(results)
    if extra > 0:
        parts = [" | ".join(parts[: extra + 1]), *parts[extra + 1 :]]
    return tuple(parts)


def row_of(instruction: Instruction) -> Row | None:
    """The row of an instruction, generated for comparisons; None if it is no arithmetic."""
    name = ALIASES.get(instruction.name, instruction.name)
    if instruction.fields.get("clamp") and instruction.encoding == "VOP3":
        name += ".clamp"
    if (row := table().get(name)) is not None:
        return row
    if (found := COMPARE.match(name)) is None or found[2] not in COMPARISONS:
        return None
    form, relation, kind, bits = found.groups()
    expression = COMPARISONS[relation]
    if kind == "f" and relation == "lg":
        expression = ORDERED_UNEQUAL
    kind = {"64": kind.upper(), "16": "w"}.get(bits, kind)
    result = {"v_cmp": "m", "v_cmpx": "X", "s_cmp": "s"}[form]
    return Row(result, kind + ("u" if relation == "class" else kind), (expression,))


def meaning(instruction: Instruction) -> Meaning | None:
    """The row and operands of an instruction; None if it is no arithmetic. Raises CodecError for a
    modifier or an operand that the table cannot express."""
    row = row_of(instruction)
    if row is None:
        return None
    _check_modifiers(instruction, row)
    return Meaning(row, tuple(_results(instruction, row)), tuple(_sources(instruction, row)))


def access(instruction: Instruction) -> Access:
    """The registers an instruction reads and writes, EXEC as ``isa.EXEC``. Raises CodecError for an
    instruction without semantics."""
    known = instruction.known
    if not known:
        known.append(_access(instruction))
    found = known[0]
    assert isinstance(found, Access)
    return found


def _access(instruction: Instruction) -> Access:
    name, fields = instruction.name, instruction.fields
    if (found := meaning(instruction)) is not None:
        reads = _numbers(found.sources)
        writes = _numbers(found.results)
        if found.row.keeps or any(t.type in "wh" for t in found.results):
            reads |= _numbers(found.results[:1])
        if "X" in found.row.results:
            reads |= {EXEC}
            writes |= {EXEC}
        return Access(reads, writes)
    if found_load := SCALAR_LOAD.match(name):
        count = -(-SIZES[found_load[1]] // 4)
        reads = frozenset(_span(2 * fields["sbase"], 2)) | _scalar(fields["soffset"])
        return Access(reads, frozenset(_span(fields["sdata"], count)))
    if found_global := GLOBAL.match(name):
        return _global_access(fields, found_global[1], SIZES[found_global[3]])
    if LOCAL.match(name) or ATOMIC.match(name):
        return _local_access(instruction)
    return _special_access(instruction)


def local_sizes(name: str) -> tuple[int, int, int]:
    """For a load or store of group memory: dwords at an address, addresses, and the unit of its
    offsets in bytes."""
    found = LOCAL.match(name)
    assert found is not None
    dwords = int(found[4]) // 32
    pair = found[2] is not None
    return dwords, 2 if pair else 1, (dwords * 4 * (64 if found[3] else 1)) if pair else 1


def matrix_sources(instruction: Instruction) -> Iterator[tuple[int, int]]:
    """First register and number of registers of each operand of a matrix product; no registers for
    a third operand of 0. Raises CodecError for another constant or a scalar register."""
    for source, count in zip(("src0", "src1", "src2"), MATRIX_DWORDS, strict=True):
        operand = instruction.source(source)
        if operand.kind is Kind.VECTOR:
            yield operand.value, count
        elif source == "src2" and operand == Operand(Kind.CONSTANT, 0):
            yield 0, 0
        else:
            raise CodecError(
                f"{instruction.name} at {instruction.address:#x}: {source} is not supported"
            )


def _results(instruction: Instruction, row: Row) -> Iterator[Typed]:
    fields, encoding, name = instruction.fields, instruction.encoding, instruction.name
    first, others = row.results[0], row.results[1:]
    if first == "s":
        yield Typed("s", Operand(Kind.SCALAR, SCC))
    elif encoding == "VOPC" or (encoding == "VOP3" and name.startswith("v_cmp")):
        number = VCC if encoding == "VOPC" else fields["vdst"]
        if first == "m":
            yield Typed("m", Operand(Kind.SCALAR, number))
    elif encoding in ("SOP1", "SOP2", "SOPK"):
        yield Typed("b" if first == "X" else first, Operand(Kind.SCALAR, fields["sdst"]))
    else:
        kind = Kind.SCALAR if first == "F" else Kind.VECTOR
        yield Typed("f" if first == "F" else first, Operand(kind, fields["vdst"]))
    for letter in others:
        number = SCC if letter == "s" else fields["sdst"] if encoding == "VOP3" else VCC
        yield Typed(letter, Operand(Kind.SCALAR, number))


def _sources(instruction: Instruction, row: Row) -> Iterator[Typed]:
    encoding, fields = instruction.encoding, instruction.fields
    names = {
        "VOP2": ["src0", "vsrc1"],
        "VOPC": ["src0", "vsrc1"],
        "SOPK": ["sdst"],
        "SOP1": ["src0"],
        "VOP1": ["src0"],
    }.get(encoding, ["src0", "src1", "src2"])
    remaining = iter(names)
    for letter in row.sources:
        if letter == "k":
            yield Typed("u", Operand(Kind.CONSTANT, signed(fields["simm"], 16) & 0xFFFF_FFFF))
        elif letter == "K":
            assert instruction.literal is not None
            yield Typed("f", Operand(Kind.CONSTANT, instruction.literal, True))
        elif letter == "s":
            yield Typed("s", Operand(Kind.SCALAR, SCC))
        elif (source := next(remaining, None)) is not None:
            yield Typed(letter, instruction.source(source))
        else:
            yield Typed(letter, Operand(Kind.SCALAR, VCC))


def _check_modifiers(instruction: Instruction, row: Row) -> None:
    fields, name = instruction.fields, instruction.name
    if instruction.encoding != "VOP3":
        return
    # Instructions that carry encode their second result in the bits of ``abs`` and ``opsel``.
    single = name not in CARRYING
    types = "ufh" if name == "v_cndmask_b32" else "fh"
    floats = sum(1 << n for n, letter in enumerate(row.sources) if letter in types)
    if fields["neg"] & ~floats or (single and fields["abs"] & ~floats):
        raise CodecError(f"{name} at {instruction.address:#x}: a sign of an integer")
    if fields["omod"] or (single and fields["opsel"]):
        raise CodecError(f"{name} at {instruction.address:#x}: its modifiers are not supported")
    if fields["clamp"] and row is not table().get(f"{name}.clamp"):
        raise CodecError(f"{name} at {instruction.address:#x}: clamp is not supported")


def _numbers(operands: Iterable[Typed]) -> frozenset[int]:
    return frozenset(number for typed in operands for number in typed.registers)


def _span(first: int, count: int) -> Iterator[int]:
    return iter(range(first, first + count))


def _scalar(number: int) -> frozenset[int]:
    return frozenset(() if number == NULL else (number,))


def _vectors(first: int, count: int) -> frozenset[int]:
    return frozenset(_span(VECTOR_OFFSET + first, count))


def _global_access(fields: Mapping[str, int], direction: str, nbytes: int) -> Access:
    count = -(-nbytes // 4)
    wide = fields["saddr"] == NULL
    reads = _vectors(fields["vaddr"], 2 if wide else 1) | {EXEC}
    if not wide:
        reads |= frozenset(_span(fields["saddr"], 2))
    if direction == "load":
        return Access(reads, _vectors(fields["vdst"], count))
    return Access(reads | _vectors(fields["vsrc"], count), frozenset())


def _local_access(instruction: Instruction) -> Access:
    fields, name = instruction.fields, instruction.name
    reads = _vectors(fields["addr"], 1) | {EXEC}
    if (found := ATOMIC.match(name)) is not None:
        written = _vectors(fields["vdst"], 1) if found[1] else frozenset[int]()
        return Access(reads | _vectors(fields["data0"], 1), written)
    dwords, addresses, _ = local_sizes(name)
    if "load" in name:
        return Access(reads, _vectors(fields["vdst"], dwords * addresses))
    for data in ("data0", "data1")[:addresses]:
        reads |= _vectors(fields[data], dwords)
    return Access(reads, frozenset())


NO_OPERATION = re.compile(
    r"s_(nop|clause|delay_alu|wait_\w+|waitcnt\w*|sendmsg|barrier(_signal|_wait)?|branch|endpgm"
    r"|code_end|setprio|set_inst_prefetch_distance)$"
)
BRANCH_READS = {"scc0": SCC, "scc1": SCC, "vccz": VCC, "vccnz": VCC, "execz": EXEC, "execnz": EXEC}


def _special_access(instruction: Instruction) -> Access:
    name, fields = instruction.name, instruction.fields
    none: frozenset[int] = frozenset()
    if NO_OPERATION.match(name) or name == "s_barrier_signal":
        return Access(none, none)
    if name.startswith("s_cbranch_"):
        return Access(frozenset({BRANCH_READS[name.removeprefix("s_cbranch_")]}), none)
    sources = ["src0"] if name == "v_readfirstlane_b32" else ["src0", "src1", "src2"]
    typed = {s: Typed("u", instruction.source(s)) for s in sources if s in fields}
    if name == "v_readfirstlane_b32":
        return Access(_numbers([typed["src0"]]) | {EXEC}, frozenset({fields["vdst"]}))
    if name == "v_readlane_b32":
        return Access(_numbers([typed["src0"], typed["src1"]]), frozenset({fields["vdst"]}))
    if name == "v_writelane_b32":
        both = _numbers([typed["src0"], typed["src1"]])
        return Access(both | _vectors(fields["vdst"], 1), _vectors(fields["vdst"], 1))
    if name == "v_dot4_i32_iu8":
        return Access(_numbers(typed.values()), _vectors(fields["vdst"], 1))
    if name == MATRIX:
        read = [_vectors(first, count) for first, count in matrix_sources(instruction)]
        written = _vectors(fields["vdst"], MATRIX_DWORDS[2])
        return Access(frozenset().union(*read) | {EXEC}, written)
    raise CodecError(f"{name} at {instruction.address:#x}: has no semantics")
