"""Lists code as text: for each instruction its name and what it writes and reads.

Registers are those of the table of semantics, so a listing shows what the wait check and the
simulator use, not an assembler's spelling."""

from collections.abc import Iterable, Iterator

from accel.amd.isa import decode
from accel.amd.isa.blocks import blocks_of
from accel.amd.isa.semantics import VECTOR_OFFSET, access
from contract.kernel import KernelHeader

NAMED = {
    decode.VCC: "vcc",
    decode.EXEC: "exec",
    decode.M0: "m0",
    decode.NULL: "null",
    decode.SCC: "scc",
}
ENCODED = {encoding.name: encoding for encoding in decode.GFX12.encodings}
OFFSETS = ("offset", "offset0", "offset1")
TTMP, TTMPS = 108, 16
VGPRS = 1536
"""32-bit registers of a lane that a SIMD has for all its waves."""
VGPR_GRANULE = 24
MAX_WAVES = 16
"""Most waves of a SIMD."""
LDS_BYTES = 64 << 10
"""Group memory of a compute unit, which has two SIMDs; code is compiled for units, not pairs."""
SIMDS = 2


def listing(kernel: KernelHeader) -> Iterator[str]:
    """A kernel's resources, then a line for each instruction. Raises CodecError for code that
    cannot be decoded."""
    x, y, z = kernel.workgroup_size
    yield (
        f"{kernel.name}: {kernel.target.name.lower()}, {len(kernel.code):,} bytes, groups of "
        f"{x * y * z}, {kernel.vgpr_count} vector registers, {kernel.lds_bytes:,} bytes of group "
        f"memory, at most {occupancy(kernel)} waves a SIMD"
    )
    isa = decode.isa_of(kernel.target)
    starts = set(blocks_of(kernel.code, isa))
    for instruction in decode.instructions(kernel.code, isa):
        if instruction.address in starts:
            yield f"{instruction.address:#x}:"
        yield f"    {line(instruction, kernel.code)}"


def occupancy(kernel: KernelHeader) -> int:
    """Waves of a kernel that a SIMD can hold, given registers and group memory."""
    registers = -(-kernel.vgpr_count // VGPR_GRANULE) * VGPR_GRANULE
    waves = min(MAX_WAVES, VGPRS // registers)
    if kernel.lds_bytes:
        x, y, z = kernel.workgroup_size
        group_waves = -(-x * y * z // 32)
        waves = min(waves, LDS_BYTES // kernel.lds_bytes * group_waves // SIMDS)
    return max(waves, 1)


def line(instruction: decode.Instruction, code: bytes) -> str:
    """One instruction: words, mnemonic, registers written <- registers and constants read."""
    words = code[instruction.address : instruction.end]
    shown = " ".join(words[n : n + 4][::-1].hex() for n in range(0, len(words), 4))
    touched = access(instruction)
    parts = [f"{spans(touched.writes)} <-"] if touched.writes else []
    parts += [spans(touched.reads), *_constants(instruction)]
    if "branch" in instruction.name:
        parts.append(f"to {instruction.target:#x}")
    return f"{shown:<27}{instruction.name:<26}{' '.join(filter(None, parts))}".rstrip()


def _constants(instruction: decode.Instruction) -> Iterator[str]:
    """Constants among the operands, and offsets of addresses."""
    fields = instruction.fields
    for name in ENCODED[instruction.encoding].sources:
        operand = instruction.source(name)
        if operand.kind is decode.Kind.CONSTANT:
            yield f"{operand.value:#x}"
    if instruction.name in decode.LITERAL_AFTER and instruction.literal is not None:
        yield f"{instruction.literal:#x}"
    if "simm" in fields and "branch" not in instruction.name:
        yield f"{fields['simm']:#x}"
    yield from (f"+{fields[name]:#x}" for name in OFFSETS if fields.get(name))


def spans(registers: Iterable[int]) -> str:
    """Names of registers, consecutive ones as a range."""
    found: list[tuple[str, int, int]] = []
    for number in sorted(registers):
        kind, index = _register(number)
        if found and kind in "sv" and found[-1][0] == kind and found[-1][2] == index - 1:
            found[-1] = kind, found[-1][1], index
        else:
            found.append((kind, index, index))
    return " ".join(_span(*span) for span in found)


def _span(kind: str, first: int, last: int) -> str:
    if kind not in ("s", "v", "ttmp"):
        return kind
    return f"{kind}{first}" if first == last else f"{kind}[{first}:{last}]"


def _register(number: int) -> tuple[str, int]:
    if number >= VECTOR_OFFSET:
        return "v", number - VECTOR_OFFSET
    if number in NAMED:
        return NAMED[number], 0
    if TTMP <= number < TTMP + TTMPS:
        return "ttmp", number - TTMP
    if number in (decode.VCC + 1, decode.EXEC + 1):
        return f"{NAMED[number - 1]}_hi", 0
    return "s", number
