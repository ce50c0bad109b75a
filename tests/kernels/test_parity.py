"""Every op of the kernel dialect as OpenCL C on a processor, against its numpy definition.

Cases are the parity suite's, one or two of every opcode and storage type; ZINC_RT_PARITY_CASES asks
for so many of each, or for all.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel.kernels import source
from accel.opencl import modules, runtime
from accel.opencl.program import module_options
from accel.opencl.tier import OpenClTier
from accel.packets.ops import TABLE as DEVICE_OPS
from accel.packets.rules import lower_graph
from contract.dtypes import F16, Q4_K, WEIGHT_DTYPES, DType
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from harness.parity import STRATEGIES, Case, all_cases, compare
from harness.parity.execute import build_graph
from tests.kernels.processor import cpu_device
from tests.opencl.work_groups import work_group_tier

MOST = os.environ.get("ZINC_RT_PARITY_CASES", "")
ELSEWHERE = (
    *(Opcode.EMBED, Opcode.RMS_NORM, Opcode.MATMUL, Opcode.SWIGLU, Opcode.LOAD_REQUEST_STATE),
    *(Opcode.KV_WRITE_BATCHED, Opcode.FLASH_ATTN, Opcode.MOE_GATE_TOPK),
)
"""Opcodes whose kernels take operands from everywhere, divide and take roots."""

UNROLLED = Opcode.MATMUL, Opcode.FLASH_ATTN
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


CASES = chosen(MOST) if MOST else one_or_two()


@pytest.fixture(scope="module")
def tier(kernel_cache: Path) -> Iterator[OpenClTier]:
    with work_group_tier(cpu_device(), kernel_cache, shared_addresses=True) as opened:
        yield opened


def test_every_op_of_the_table_is_compared() -> None:
    """The cases lower to all of them but those that no opcode alone becomes."""
    assert {case.opcode for case in CASES} == set(STRATEGIES)
    found = set()
    for case in CASES:
        sizes = {"tokens": 1, "rows": 1} | dict(case.sizes)
        counts = ShapeKey(sizes["tokens"], sizes["rows"])
        step = lower_graph(build_graph(case), counts, 64, "opencl")
        found |= {op.name for op in step.ops}
    assert found == set(DEVICE_OPS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(tier: OpenClTier, case: Case) -> None:
    """Every element of every output and updated operand equals the definition's."""
    problems = compare(tier, case)
    assert not problems, "; ".join(f"{name}: {found}" for name, found in problems.items())


@pytest.mark.parametrize(
    ("choices", "formats"),
    [
        pytest.param({"shared_addresses": False}, FORMATS, id="banked"),
        pytest.param(
            {"native_arithmetic": False}, FORMATS[:2], id="integers", marks=pytest.mark.long
        ),
    ],
)
def test_other_devices(
    kernel_cache: Path, choices: dict[str, bool], formats: tuple[DType | None, ...]
) -> None:
    """Memory of the device's own, and division and roots in integers, which no format needs."""
    with work_group_tier(cpu_device(), kernel_cache, **choices) as tier:
        for case in CASES:
            if case.opcode in ELSEWHERE and case.dtype in formats:
                assert compare(tier, case) == {}, str(case)


@pytest.mark.long
def test_unrolled_loops(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerators get the text, see ``rolled_source``, and optimized."""
    monkeypatch.setattr(modules, "module_source", source.module_source)
    monkeypatch.setattr(runtime, "module_options", module_options)
    with work_group_tier(cpu_device(), kernel_cache) as tier:
        for case in CASES:
            if case.opcode in UNROLLED and case.dtype in FORMATS:
                assert compare(tier, case) == {}, str(case)


def test_a_wrong_kernel_is_noticed(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One addition turned round fails."""
    stored = source._file
    monkeypatch.setattr(
        source, "_file", lambda name: stored(name).replace("A(a) + A(b)", "A(a) - A(b)")
    )
    cases = [case for case in CASES if case.opcode is Opcode.ADD]
    with work_group_tier(cpu_device(), kernel_cache) as tier:
        assert any(compare(tier, case) for case in cases)
