"""The instruction sets that the native library is compiled for, and which a machine can run."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from contract.lazy_dataclass import dataclass

WORDS = 5
"""The number of words that ``processor.c`` reports."""
Bit = tuple[int, int]
"""A feature: the index of a word of ``processor.c`` and a bit in that word."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The library for one instruction set.

    ``cpu`` names the instruction set for zig, ``march`` for another clang. The processor must
    have the features ``needs``; the operating system must have set the bits ``registers`` of XCR0.
    """

    name: str
    machine: str
    cpu: str
    march: str
    needs: frozenset[Bit] = frozenset()
    registers: int = 0

    def runs_on(self, words: Sequence[int]) -> bool:
        """Whether it runs on a machine of its architecture whose processor reports these words."""
        listed = all(words[word] >> bit & 1 for word, bit in self.needs)
        return listed and words[4] & self.registers == self.registers


SSE3, SSSE3, FMA, CX16, SSE41, SSE42, MOVBE, POPCNT, OSXSAVE, AVX, F16C = (
    (0, bit) for bit in (0, 9, 12, 13, 19, 20, 22, 23, 27, 28, 29)
)
BMI1, AVX2, BMI2, AVX512F, AVX512DQ, AVX512CD, AVX512BW, AVX512VL = (
    (1, bit) for bit in (3, 5, 8, 16, 17, 28, 30, 31)
)
AVX512VNNI = (2, 11)
LAHF, LZCNT = (3, 0), (3, 5)
DOT_PRODUCTS = (0, 20)

XMM, YMM, OPMASK, ZMM_LOW, ZMM_HIGH = (1 << bit for bit in (1, 2, 5, 6, 7))

_V2 = frozenset((SSE3, SSSE3, CX16, SSE41, SSE42, POPCNT, LAHF))
_V3 = _V2 | {FMA, MOVBE, OSXSAVE, AVX, F16C, BMI1, AVX2, BMI2, LZCNT}
_V4 = _V3 | {AVX512F, AVX512DQ, AVX512CD, AVX512BW, AVX512VL}
_AVX_STATE = XMM | YMM
_AVX512_STATE = _AVX_STATE | OPMASK | ZMM_LOW | ZMM_HIGH

VARIANTS = (
    Variant(
        "x86-64-v4-vnni",
        "x86_64",
        "x86_64_v4+avx512vnni",
        "-march=x86-64-v4 -mavx512vnni",
        _V4 | {AVX512VNNI},
        _AVX512_STATE,
    ),
    Variant("x86-64-v4", "x86_64", "x86_64_v4", "-march=x86-64-v4", _V4, _AVX512_STATE),
    Variant("x86-64-v3", "x86_64", "x86_64_v3", "-march=x86-64-v3", _V3, _AVX_STATE),
    Variant("x86-64-v2", "x86_64", "x86_64_v2", "-march=x86-64-v2", _V2),
    Variant(
        "aarch64-dotprod",
        "aarch64",
        "generic+v8_2a+dotprod",
        "-march=armv8.2-a+dotprod",
        frozenset((DOT_PRODUCTS,)),
    ),
    Variant("aarch64-neon", "aarch64", "generic", "-march=armv8-a"),
)
"""All variants; the fastest of each architecture comes first."""

MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
"""The architecture for each name that an operating system uses, in lower case."""


def machine() -> str:
    """This machine's architecture, or an empty text when no variant exists for it."""
    return MACHINES.get(platform.machine().lower(), "")


def usable(words: Sequence[int], architecture: str) -> list[Variant]:
    """The variants that run on a machine that reports these words, the fastest first."""
    return [v for v in VARIANTS if v.machine == architecture and v.runs_on(words)]
