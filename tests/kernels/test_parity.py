"""Every op of the kernel dialect against its numpy definition: as OpenCL C on a processor, as Metal
on a simulated Mac, as SPIR-V on a simulated Intel GPU, as machine code on simulated AMD GPUs.

Devices that a processor plays cannot run all cases: ZINC_RT_PARITY_CASES asks for so many of each
opcode and storage type, or for all; ZINC_RT_PARITY_PART=3/8 is the third of eight parts of the soak
tests' cases."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pytest

from accel.kernels import source
from accel.kernels.source import Traits
from accel.opencl import modules, runtime
from accel.opencl.program import module_options
from accel.packets.ops import TABLE as DEVICE_OPS
from accel.packets.rules import lower_graph
from contract.dtypes import F16, F32, IQ4_NL, Q3_K, Q4_K, Q5_0, WEIGHT_DTYPES
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from contract.tier import Tier
from harness.parity.cases import Case, all_cases, generate
from harness.parity.execute import build_graph, compare
from harness.parity.shape import OpShape
from harness.parity.shapes import STRATEGIES
from tests.kernels.machines import MACHINES

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
KINDS = *FORMATS, Q5_0, Q3_K, IQ4_NL
"""A float format, with and without minima, of 32 and of 256, with codes of its own."""


@cache
def grouped() -> dict[str, list[Case]]:
    """All cases, by opcode and storage type."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in all_cases(1):
        groups[f"{case.opcode.name}-{case.dtype}"].append(case)
    return groups


def chosen(most: str) -> list[Case]:
    """So many of each opcode and storage type, from all over their list, or "all"."""
    if most == "all":
        return [case for group in grouped().values() for case in group]
    return [
        group[len(group) * i // int(most)]
        for group in grouped().values()
        for i in range(min(int(most), len(group)))
    ]


def each_somewhere(cases: list[Case]) -> list[Case]:
    """Every opcode and every format, but each format only where it is multiplied by: other opcodes
    that read weights have F32 and a fifth of the others, in turn. Vulkan has a third in every run
    and every pair by ``--all``."""
    dtypes: dict[Opcode, dict[object, int]] = defaultdict(dict)
    for case in cases:
        dtypes[case.opcode].setdefault(case.dtype, len(dtypes) + len(dtypes[case.opcode]))
    return [
        case
        for case in cases
        if case.opcode is Opcode.MATMUL
        or case.dtype == F32
        or len(dtypes[case.opcode]) < len(WEIGHT_DTYPES)
        or dtypes[case.opcode][case.dtype] % 5 == 0
    ]


def one_or_two() -> list[Case]:
    """Two of each storage type, in the first of which one token reads weights, in the second many;
    one of the two, in turn, where there are formats of all sorts. A processor's compiler takes
    seconds for each pair of a format and a kernel, and by ``--all`` Vulkan has every pair."""
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
INTEL_CASES = list({case.opcode: case for case in METAL_CASES}.values())
"""One of each opcode: the text of a kernel is tested elsewhere, here what clang makes of it."""
SMALL_CASES = [case for case in AMD_CASES if case.opcode in ELSEWHERE and case.opcode not in SLOW]


parity = pytest.mark.parity
UNROLLED = Opcode.MATMUL, Opcode.FLASH_ATTN
CASES = {
    "work-groups": WORK_GROUP_CASES if MOST else each_somewhere(WORK_GROUP_CASES),
    "metal-simulated": METAL_CASES,
    "intel-simulated": INTEL_CASES,
    "gfx1201": AMD_CASES,
    "gfx1100": SMALL_CASES[::5],
}


def in_each_format(case: Case, machine: str) -> bool:
    """Whether every run has this format of an opcode on a machine, not one of all."""
    return machine == "work-groups" and case.opcode is Opcode.MATMUL and case.dtype in KINDS


def in_every_run(case: Case, machine: str) -> bool:
    """Whether a case is one of every run: of Intel's, whose steps ``tests/tiers`` has, the opcodes
    ELSEWHERE."""
    return case in REPRESENTATIVE[machine] and (
        machine != "intel-simulated" or case.opcode in ELSEWHERE
    )


REPRESENTATIVE = {
    name: list(
        {(one.opcode, in_each_format(one, name) and one.dtype): one for one in cases}.values()
    )
    for name, cases in CASES.items()
}
"""Vulkan compares every opcode and every storage type from the same texts of kernels."""
INTEGERS = Traits(divide=False, root=False, half=False)


def on(machine: str, name: str, *values: Any, marks: tuple[pytest.MarkDecorator, ...] = ()) -> Any:
    """Parameters of a test on that machine."""
    marks = (*marks, *([] if machine == "work-groups" else [parity]))
    return pytest.param(machine, *values, id=f"{name}-{machine}", marks=marks)


def one_of_each(cases: Iterable[Case]) -> list[Case]:
    """A case of each opcode."""
    return list({case.opcode: case for case in cases}.values())


def sampled() -> Iterator[Case]:
    """Rows long enough that every item of a group has candidates, beside those of parity."""
    yield from (*generate(Opcode.SAMPLE), *generate(Opcode.LOG_PROBABILITIES))
    for vocab in (129, 5000, 20011):
        sizes = {"rows": 7, "vocab": vocab, "recent_tokens": 8, "slots": 3}
        tables = {"masks": 4, "mask_words": -(-vocab // 32), "biases": 50}
        without = OpShape(f"7x{vocab}", sizes, absent=frozenset(("allowed", "bias")))
        for shape in (without, OpShape(f"7x{vocab}-constrained", sizes | tables)):
            for kind in ("normal", "zeros", "nan"):
                yield Case(Opcode.SAMPLE, None, shape, kind, 0)
        listed = OpShape(f"3x{vocab}", {"rows": 3, "vocab": vocab, "top": 20})
        yield Case(Opcode.LOG_PROBABILITIES, None, listed, "normal", 0)


BANKED = of(WORK_GROUP_CASES, FORMATS)
OF_BANKS = Opcode.EMBED, Opcode.MATMUL, Opcode.KV_WRITE_BATCHED
"""Rows of tables, of matrices and of pages."""
OTHERS = [
    on("work-groups", "banked", {"shared_addresses": False},
       one_of_each(case for case in BANKED if case.opcode in OF_BANKS)),
    on("work-groups", "banked-formats", {"shared_addresses": False}, BANKED,
       marks=(pytest.mark.long,)),
    on("work-groups", "sampled", {}, [*sampled()], marks=(pytest.mark.long,)),
    on(
        "work-groups", "integers", {"native_arithmetic": False},
        of(WORK_GROUP_CASES, FORMATS[:2]), marks=(pytest.mark.long,),
    ),
    on("metal-simulated", "integers", {"traits": INTEGERS}, METAL_INTEGER_CASES,
       marks=(pytest.mark.long,)),
    on("metal-simulated", "before-macos-15", {"math_mode": False}, METAL_CASES[::8],
       marks=(pytest.mark.long,)),
    on("gfx1201", "user-queues", {"driver": "t2"}, SMALL_CASES[::3], marks=(pytest.mark.long,)),
    on("gfx1201", "integers", {"native": False}, SMALL_CASES[::4], marks=(pytest.mark.long,)),
    on("gfx1100", "integers", {"native": False}, SMALL_CASES[::12]),
]  # fmt: skip
"""Memory of the device's own; division and roots in integers, which no format needs; a compiler
that turns fast mathematics off by another message; the other driver's ring and memory."""


@pytest.fixture(scope="module")
def machine(request) -> str:
    """A name in MACHINES."""
    return str(request.param)


@pytest.fixture(scope="module")
def tier(machine, kernel_cache) -> Iterator[Tier]:
    """One tier of a machine for all its cases."""
    with MACHINES[machine](kernel_cache) as opened:
        yield opened


def problems_of(tier: Tier, cases: list[Case]) -> list[str]:
    """Every element of every output and updated operand that is not the definition's."""
    return [f"{case}: {found}" for case in cases for found in compare(tier, case).items()]


def test_every_op_of_the_table_is_compared():
    """The cases lower to all of them but those that no opcode alone becomes."""
    assert {case.opcode for case in CASES["work-groups"]} == set(STRATEGIES)
    found = set()
    for case in CASES["work-groups"]:
        sizes = {"tokens": 1, "rows": 1} | dict(case.sizes)
        counts = ShapeKey(sizes["tokens"], sizes["rows"])
        step = lower_graph(build_graph(case), counts, 64, "opencl")
        found |= {op.name for op in step.ops}
    assert found == set(DEVICE_OPS)


@pytest.mark.parametrize("name", ["metal-simulated", "intel-simulated", "gfx1201"])
def test_every_opcode_is_compared(name):
    """On each simulated device that is not a variant of another."""
    assert {case.opcode for case in CASES[name]} == set(STRATEGIES)


def test_parts_are_the_whole():
    cases = chosen("all")
    assert sorted(map(str, cases)) == sorted(
        str(case) for number in (1, 2, 3) for case in part(cases, f"{number}/3")
    )


@pytest.mark.parametrize(
    ("machine", "case"),
    [
        on(name, str(case), case, marks=() if in_every_run(case, name) else (pytest.mark.long,))
        for name, cases in CASES.items()
        for case in cases
    ],
    indirect=["machine"],
    scope="module",
)
def test_parity(tier, case):
    """Every element of every output and updated operand equals the definition's."""
    assert problems_of(tier, [case]) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("machine", "group"),
    [
        on(name, group, group)
        for name in ("metal-simulated", "intel-simulated", "gfx1201", "gfx1100")
        for group in grouped()
    ],
    indirect=["machine"],
    scope="module",
)
def test_all(tier, machine, group):
    """Every case of the suite, or of the part that ZINC_RT_PARITY_PART asks for; of the older AMD
    GPU a sixteenth."""
    asked = {*map(id, part(chosen("all"), "1/16" if machine == "gfx1100" else PART))}
    assert problems_of(tier, [case for case in grouped()[group] if id(case) in asked]) == []


@pytest.mark.parametrize(("machine", "choices", "cases"), OTHERS)
def test_other_devices(kernel_cache, machine, choices, cases):
    """Some cases, on a device that is like that machine's but for one thing."""
    assert cases
    with MACHINES[machine](kernel_cache, **choices) as tier:
        assert problems_of(tier, cases) == []


@pytest.mark.long
def test_unrolled_loops(kernel_cache, monkeypatch):
    """As accelerators get the text, see ``rolled_source``, and optimized."""
    monkeypatch.setattr(modules, "module_source", source.module_source)
    monkeypatch.setattr(runtime, "module_options", module_options)
    cases = [case for case in of(WORK_GROUP_CASES, FORMATS) if case.opcode in UNROLLED]
    with MACHINES["work-groups"](kernel_cache, shared_addresses=None) as tier:
        assert problems_of(tier, cases) == []


@pytest.mark.parametrize("machine", [on("work-groups", "add"), on("metal-simulated", "add")])
def test_a_wrong_kernel_is_noticed(kernel_cache, monkeypatch, machine):
    """One addition turned round fails; kernels of AMD GPUs are built ahead."""
    stored = source._file
    monkeypatch.setattr(
        source, "_file", lambda name: stored(name).replace("A(a) + A(b)", "A(a) - A(b)")
    )
    cases = [case for case in CASES[machine] if case.opcode is Opcode.ADD]
    with MACHINES[machine](kernel_cache) as tier:
        assert problems_of(tier, cases) != []
