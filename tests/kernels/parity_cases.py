"""Cases of the parity suite for devices that a processor plays, which cannot run all of them.

ZINC_RT_PARITY_CASES asks for so many of each opcode and storage type, or for all.
ZINC_RT_PARITY_PART=3/8 is the third of eight parts of the soak tests' cases."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

from contract.dtypes import F16, F32, Q4_K, WEIGHT_DTYPES
from contract.opcodes import Opcode
from harness.parity import Case, all_cases

MOST = os.environ.get("ZINC_RT_PARITY_CASES", "")
PART = os.environ.get("ZINC_RT_PARITY_PART", "1/1")
ELSEWHERE = (
    *(Opcode.EMBED, Opcode.RMS_NORM, Opcode.MATMUL, Opcode.SWIGLU, Opcode.LOAD_REQUEST_STATE),
    *(Opcode.KV_WRITE_BATCHED, Opcode.FLASH_ATTN, Opcode.MOE_GATE_TOPK),
)
"""Opcodes whose kernels take operands from everywhere, divide and take roots."""
SLOW = (Opcode.SHARED_EXPERT, Opcode.FLASH_ATTN_BATCHED, Opcode.MOE_GATE_UP, Opcode.MOE_DOWN_ACC)
"""On a simulated AMD GPU one storage type of these is enough for every commit: other opcodes have
their kernels too."""
FORMATS = None, F16, Q4_K
"""Of weights F16 is read by products of many tokens, Q4_K by that of one."""


def chosen(most: str) -> list[Case]:
    """So many of each opcode and storage type, from all over their list, or "all"."""
    groups: dict[tuple[Opcode, object], list[Case]] = defaultdict(list)
    for case in all_cases(1):
        groups[case.opcode, case.dtype].append(case)
    if most == "all":
        return [case for group in groups.values() for case in group]
    return [
        group[len(group) * i // int(most)]
        for group in groups.values()
        for i in range(min(int(most), len(group)))
    ]


def each_somewhere(cases: list[Case]) -> list[Case]:
    """Every opcode and every format, but each format only where it is multiplied by: other opcodes
    that read weights have a fourth of the formats, others in turn. Vulkan has every pair."""
    dtypes: dict[Opcode, dict[object, int]] = defaultdict(dict)
    for case in cases:
        dtypes[case.opcode].setdefault(case.dtype, len(dtypes) + len(dtypes[case.opcode]))
    return [
        case
        for case in cases
        if case.opcode is Opcode.MATMUL
        or len(dtypes[case.opcode]) < len(WEIGHT_DTYPES)
        or dtypes[case.opcode][case.dtype] % 4 == 0
    ]


def one_or_two() -> list[Case]:
    """Two of each storage type, in the first of which one token reads weights, in the second many;
    one of the two, in turn, where there are formats of all sorts. A processor's compiler takes
    seconds for each pair of a format and a kernel, and Vulkan has every pair."""
    groups: dict[Opcode, list[list[Case]]] = defaultdict(list)
    for case in chosen("2"):
        pairs = groups[case.opcode]
        if not pairs or pairs[-1][0].dtype != case.dtype:
            pairs.append([])
        pairs[-1].append(case)
    return [
        case
        for pairs in groups.values()
        for number, pair in enumerate(pairs)
        for case in (pair if len(pairs) < len(WEIGHT_DTYPES) else pair[number % 2 :][:1])
    ]


def one_of_slow(cases: list[Case]) -> Iterator[Case]:
    """All cases, but of the opcodes in SLOW a single one."""
    met = set()
    for case in cases:
        if case.opcode in SLOW and case.opcode in met:
            continue
        met.add(case.opcode)
        yield case


def of(cases: list[Case], formats: tuple[object, ...]) -> list[Case]:
    """Those of the opcodes ELSEWHERE with one of the storage types."""
    return [case for case in cases if case.opcode in ELSEWHERE and case.dtype in formats]


def part(cases: list[Case], named: str) -> list[Case]:
    """Every n-th of them, from the k-th on, for "k/n" with 1 <= k <= n."""
    number, parts = (int(word) for word in named.split("/"))
    assert 1 <= number <= parts, f"ZINC_RT_PARITY_PART={named}"
    return cases[number - 1 :: parts]


WORK_GROUP_CASES = chosen(MOST) if MOST else one_or_two()
METAL_CASES = chosen(MOST) if MOST else each_somewhere(chosen("1"))
METAL_INTEGER_CASES = of(chosen("1"), (None, F32, Q4_K))
AMD_CASES = chosen(MOST) if MOST else list(one_of_slow(each_somewhere(chosen("1"))))
INTEL_CASES = list({case.opcode: case for case in reversed(METAL_CASES)}.values())
"""One of each opcode: the text of a kernel is tested elsewhere, here what clang makes of it."""
SMALL_CASES = [case for case in AMD_CASES if case.opcode in ELSEWHERE and case.opcode not in SLOW]
