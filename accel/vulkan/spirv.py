"""Makes a SPIR-V module exact, and adds the float controls that a device has.

A driver may contract ``a * b + c`` and rearrange sums unless every result is decorated
NoContraction (SPIR-V 3.20, "Apply to an arithmetic instruction to indicate the operation cannot be
combined with another instruction")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAGIC = 0x0723_0203
HEADER_WORDS = 5
OP_NAME = {
    2: "SourceContinued",
    3: "Source",
    4: "SourceExtension",
    5: "Name",
    6: "MemberName",
    7: "String",
    8: "Line",
    10: "Extension",
    11: "ExtInstImport",
    12: "ExtInst",
    15: "EntryPoint",
    16: "ExecutionMode",
    17: "Capability",
    71: "Decorate",
    317: "NoLine",
    330: "ModuleProcessed",
}
"""Names of the instructions that this module uses."""
FLOAT_ARITHMETIC = frozenset((127, 129, 131, 133, 136, 140, 141, *range(142, 149)))
"""FNegate, FAdd, FSub, FMul, FDiv, FRem, FMod, and the products of vectors and matrices."""
DEBUGGING = frozenset(
    (
        *("SourceContinued", "Source", "SourceExtension", "Name", "MemberName", "String"),
        *("Line", "NoLine", "ModuleProcessed"),
    )
)
NO_CONTRACTION = 42
ALLOWED_EXTENDED = frozenset(
    # FAbs SAbs; Floor; Sqrt; UMin SMin UMax SMax UClamp SClamp; PackHalf2x16 UnpackHalf2x16;
    # FindILsb FindSMsb FindUMsb
    (4, 5, 8, 31, 38, 39, 41, 42, 44, 45, 58, 62, 73, 74, 75)
)
"""GLSL.std.450 instructions whose result is exact on every driver, or tested when it is opened.

The rest, such as Fma and Exp, may differ from one driver to another."""
FLOAT_CONTROLS = {
    "DenormPreserve": (4464, 4459),
    "SignedZeroInfNanPreserve": (4466, 4461),
    "RoundingModeRTE": (4467, 4462),
}
"""The capability and the execution mode of each float control; the mode has a width in bits."""
BINARY32 = 32
TYPE_VECTOR, TYPE_ARRAY, TYPE_POINTER, CONSTANT, VARIABLE = 23, 28, 32, 43, 59
WORKGROUP = 4
"""Storage class of group memory."""
INTEGER_DOT_CAPABILITY = 6019

Words = NDArray[np.uint32]


class InexactModule(Exception):
    """The module has an instruction whose result differs between drivers."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its ``opcode`` and all its ``words``."""

    opcode: int
    words: Words

    @property
    def name(self) -> str:
        """The name without ``Op``, empty for most instructions."""
        return OP_NAME.get(self.opcode, "")

    @property
    def result(self) -> int:
        """The id of an arithmetic instruction's result."""
        return int(self.words[2])


def words_of(code: bytes) -> Words:
    """A module as 32-bit words. Raises ValueError for bytes that are no module in this byte
    order."""
    words = np.frombuffer(code, "<u4") if len(code) % 4 == 0 else np.zeros(0, np.uint32)
    if len(words) < HEADER_WORDS or words[0] != MAGIC:
        raise ValueError("these bytes are not a SPIR-V module")
    return words


def instructions(words: Words) -> Iterator[Instruction]:
    """Every instruction in order. Raises ValueError if one does not end within the module."""
    index = HEADER_WORDS
    while index < len(words):
        length, opcode = int(words[index]) >> 16, int(words[index]) & 0xFFFF
        if length == 0 or index + length > len(words):
            raise ValueError(f"the SPIR-V instruction at word {index} has {length} words")
        yield Instruction(opcode, words[index : index + length])
        index += length


def exact(code: bytes) -> bytes:
    """``code`` with NoContraction on the result of every float operation, without debug text.
    Raises InexactModule for an extended instruction outside of ALLOWED_EXTENDED."""
    words = words_of(code)
    found = [i for i in instructions(words) if i.name not in DEBUGGING]
    _check_extended(found)
    decorated = decorated_results(found)
    requested = [
        i.result for i in found if i.opcode in FLOAT_ARITHMETIC and i.result not in decorated
    ]
    decorations = [_instruction(71, result, NO_CONTRACTION) for result in requested]
    first = next(n for n, i in enumerate(found) if _is_annotation_or_type(i))
    parts = [i.words for i in found]
    return _joined(words, parts[:first], decorations, parts[first:])


def with_float_controls(code: bytes, modes: Sequence[str]) -> bytes:
    """``code`` with the binary32 execution ``modes`` of FLOAT_CONTROLS added to its entry point."""
    words = words_of(code)
    capabilities = [_instruction(17, FLOAT_CONTROLS[mode][0]) for mode in modes]
    behind = HEADER_WORDS
    for entry in instructions(words):
        behind += len(entry.words)
        if entry.name == "EntryPoint":
            break
    else:
        raise ValueError("the SPIR-V module has no entry point")
    point = int(entry.words[2])
    executions = [_instruction(16, point, FLOAT_CONTROLS[mode][1], BINARY32) for mode in modes]
    return _joined(words, capabilities, [words[HEADER_WORDS:behind]], executions, [words[behind:]])


def decorated_results(found: Sequence[Instruction]) -> set[int]:
    """Ids that are decorated with NoContraction."""
    return {int(i.words[1]) for i in found if i.name == "Decorate" and i.words[2] == NO_CONTRACTION}


def group_memory_bytes(code: bytes) -> int:
    """Bytes of group memory that a module declares: arrays of 32-bit words or of their vectors."""
    words: dict[int, int] = {}
    arrays: dict[int, int] = {}
    pointers: dict[int, int] = {}
    constants: dict[int, int] = {}
    total = 0
    for i in instructions(words_of(code)):
        if i.opcode == CONSTANT:
            constants[int(i.words[2])] = int(i.words[3])
        elif i.opcode == TYPE_VECTOR:
            words[int(i.words[1])] = int(i.words[3])
        elif i.opcode == TYPE_ARRAY:
            arrays[int(i.words[1])] = constants[int(i.words[3])] * words.get(int(i.words[2]), 1)
        elif i.opcode == TYPE_POINTER:
            pointers[int(i.words[1])] = int(i.words[3])
        elif i.opcode == VARIABLE and i.words[3] == WORKGROUP:
            total += 4 * arrays.get(pointers[int(i.words[1])], 1)
    return total


def uses_integer_dot(code: bytes) -> bool:
    """Whether a module needs the device's packed dot products."""
    found = instructions(words_of(code))
    return any(i.name == "Capability" and i.words[1] == INTEGER_DOT_CAPABILITY for i in found)


def _check_extended(found: Sequence[Instruction]) -> None:
    for i in found:
        if i.name == "ExtInst" and int(i.words[4]) not in ALLOWED_EXTENDED:
            raise InexactModule(
                f"GLSL.std.450 instruction {int(i.words[4])} is not known to be exact"
            )


def _is_annotation_or_type(i: Instruction) -> bool:
    """Decorations (71 to 74) come before the first type (19 to 39)."""
    return 71 <= i.opcode <= 74 or 19 <= i.opcode <= 39


def _instruction(opcode: int, *operands: int) -> Words:
    return np.array([(1 + len(operands)) << 16 | opcode, *operands], np.uint32)


def _joined(words: Words, *parts: Sequence[Words]) -> bytes:
    flat = [words[:HEADER_WORDS], *(part for some in parts for part in some)]
    return np.concatenate(flat).astype("<u4").tobytes()
