"""Every opcode on every tier that runs here, against its numpy definition, all bits.

Some opcodes are swept in part, see ``PARTS``. The other cases are long tests, and soak tests where
a processor compiles each case's kernel in place of a device: ``pytest -m parity`` runs them all."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np
import pytest

from contract.opcodes import Opcode
from contract.ops import TABLE
from contract.records import LAST_TOKEN
from contract.tier import Tier
from harness.parity.cases import Case, all_cases, swept_dtypes
from harness.parity.execute import Example, compare, example, run_barrier
from harness.parity.operands import fill
from harness.parity.shapes import STRATEGIES
from harness.tiers import TIERS, TierOptions, open_tier
from reference.ops import DEFINITIONS
from tests.needs import need_device

pytestmark = pytest.mark.parity

MIN_CASES = 2000
THREADS = 2
REPEATS = int(os.environ.get("ZINC_RT_PARITY_REPEATS", "1"))
"""Seeds of every point; nights and releases ask for more."""
CASES = all_cases(REPEATS)


def by_shape(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Cases that differ in their values alone, which would be too many tests one by one."""
    shapes: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        shapes[case.name.removesuffix(f"-{case.kind}")].append(case)
    return dict(shapes)


SHAPES = by_shape(CASES)
PARTS = {
    Opcode.FLASH_ATTN: 6, Opcode.FLASH_ATTN_BATCHED: 4, Opcode.MOE_GATE_TOPK: 3,
    Opcode.MOE_GATE_UP: 4, Opcode.MOE_DOWN_ACC: 4, Opcode.SHARED_EXPERT: 2, Opcode.LM_HEAD: 3,
    Opcode.EMBED: 2, Opcode.HEAD_PRODUCT: 3, Opcode.RMS_NORM_FUSED_QKV: 3,
    Opcode.RMS_NORM_FUSED_MLP_GATE_UP: 3,
}  # fmt: skip
"""Every n-th shape of an opcode, another one to begin with for each storage type: how stored values
are read does not depend on windows, heads, experts and how many there are of them, nor on what
stands before or behind a product. Of MATMUL all are swept."""
COMPILED = ("opencl", "vulkan")
"""Tiers with kernels for each storage type and shape."""

LONGEST = (
    *("moe_gate_topk-f32-2x16391x1", "sample-33x1000x64x9-masks-biases", "sample-17x1000x64x9"),
    *("shared_expert-f16-9x1300x257", "flash_attn_batched-f32-widest-8x1x512"),
    *("log_probabilities-5x5000x20", "log_probabilities-17x1000x5"),
)
"""Shapes whose kernels a processor that plays a graphics card runs for seconds."""
EVERY = slice(None)
FEW, OTHERS = slice(0, None, 5), (slice(1, 5), slice(6, None))
"""Of the cases of such a shape: ordinary values and zeros, or two seeds. Other shapes of the same
opcode and storage type have the other kinds of values."""


def places() -> dict[str, tuple[Opcode, int, int]]:
    """Of each name in SHAPES the opcode, the number of the storage type and that of the shape,
    which is the same for all storage types whatever inner length they allow."""
    found: dict[str, tuple[Opcode, int, int]] = {}
    labels: dict[Opcode, dict[object, list[str]]] = defaultdict(dict)
    for name, (case, *_) in SHAPES.items():
        by_dtype = labels[case.opcode]
        own = by_dtype.setdefault(case.dtype, [])
        first = next(iter(by_dtype.values()))
        label = case.shape.label
        place = first.index(label) if label in first else len(own)
        own.append(label)
        found[name] = case.opcode, len(by_dtype) - 1, place
    return found


PLACES = places()


def swept_names() -> set[str]:
    """The n-th of an opcode's shapes, and of a shape that has none of these the first name."""
    found: dict[tuple[Opcode, int], list[str]] = {}
    for name, (opcode, dtype, place) in PLACES.items():
        names = found.setdefault((opcode, place), [])
        if (dtype + place) % PARTS.get(opcode, 1) == 0:
            names.append(name)
    firsts = {(opcode, place): name for name, (opcode, _, place) in reversed(PLACES.items())}
    return {name for key, names in found.items() for name in names or [firsts[key]]}


SWEPT = swept_names()
"""Every storage type and every shape of each opcode, though not each with each."""


def smallest_names() -> set[str]:
    """Of each opcode and storage type the smallest shape of one token or of several, in turn; of an
    opcode's first type both. Shapes without values are for those that have no others."""
    found: dict[tuple[Opcode, int], dict[bool, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, (opcode, dtype, _) in PLACES.items():
        sizes = SHAPES[name][0].sizes
        several = sizes.get("tokens", sizes.get("rows", 1)) > 1
        found[opcode, dtype][several].append(name)
    smallest = set()
    for (_, dtype), kinds in found.items():
        either = {several: min(names, key=_size) for several, names in kinds.items()}
        turn = either.get(dtype % 2 == 1)
        smallest |= {turn} if turn is not None and dtype else {*either.values()}
    return smallest


def _size(name: str) -> tuple[bool, int]:
    """Whether a shape has no values, and how many elements all its sizes together would make."""
    sizes = SHAPES[name][0].sizes
    empty = not all(sizes.get(one, 1) for one in ("tokens", "rows"))
    return empty, prod(max(1, size) for size in sizes.values())


SMALLEST = smallest_names()
"""Of every opcode in every storage type one at least, for a processor that plays a graphics card.
"""
THIRD = 3
ALL_TYPES = (Opcode.MATMUL, Opcode.EMBED)


def played_names() -> set[str]:
    """What such a processor computes in every run: products and rows of tables in all storage
    types, other opcodes in the first and in a third of the others, in turn. One text reads a type
    for all opcodes."""
    return {
        name
        for name in SMALLEST
        for opcode, dtype, _ in (PLACES[name],)
        if opcode in ALL_TYPES or not dtype or (dtype + list(Opcode).index(opcode)) % THIRD == 0
    }


PLAYED = played_names()


@pytest.fixture(scope="module")
def opened() -> Iterator[Callable[[str], Tier]]:
    """Tiers by name, kept open over all their cases: what one case leaves behind must not
    matter. No case passes beside an opcode that none of them would have."""
    assert set(TABLE) == set(DEFINITIONS)
    assert set(STRATEGIES) == set(DEFINITIONS) - {Opcode.BARRIER}
    tiers: dict[str, Tier] = {}
    with ExitStack() as stack:

        def give(name: str) -> Tier:
            if name not in tiers:
                opening = partial(open_tier, name, TierOptions(THREADS))
                tiers[name] = stack.enter_context(need_device(opening))
            return tiers[name]

        yield give


@pytest.fixture
def tier(opened, request) -> Tier:
    """The tier of a test's parameter."""
    return opened(request.param)


@lru_cache(maxsize=2)
def examples_of(shape: str) -> list[Example]:
    """The cases of a shape: the definitions take longer than most tiers, whose tests of one shape
    follow each other."""
    return [example(case) for case in SHAPES[shape]]


ON_EVERY_TIER = pytest.mark.parametrize("tier", TIERS, indirect=True)


def parts_of(shape: str, tier: str) -> Iterator[Any]:
    """The tests of a shape on a tier: the slices of its cases, with what is left to soak marked."""
    marks: list[pytest.MarkDecorator] = []
    if tier == "vulkan" and shape in SWEPT | SMALLEST and shape not in PLAYED:
        marks = [pytest.mark.long]
    elif shape not in SWEPT and not (tier == "vulkan" and shape in PLAYED):
        marks = [pytest.mark.soak if tier in COMPILED else pytest.mark.long]
    parts = (FEW, *OTHERS) if tier == "vulkan" and shape in LONGEST else (EVERY,)
    for part in parts:
        name = shape if part in (EVERY, FEW) else f"{shape}-from-{part.start}"
        later = [pytest.mark.soak] if part in OTHERS else marks
        yield pytest.param(shape, tier, part, id=f"{name}-{tier}", marks=later)


SHAPES_ON_TIERS = [part for shape in SHAPES for tier in TIERS for part in parts_of(shape, tier)]


def test_every_opcode_has_a_definition():
    """A new opcode without a numpy definition fails here."""
    assert set(TABLE) == set(DEFINITIONS)


def test_every_definition_has_a_shape_strategy():
    """BARRIER has no operands; everything else that is defined is compared."""
    assert set(STRATEGIES) == set(DEFINITIONS) - {Opcode.BARRIER}


def test_every_format_of_every_weight_is_swept():
    """Each storage type the table accepts for an operand occurs in a generated case."""
    for opcode in STRATEGIES:
        swept = {case.dtype for case in CASES if case.opcode is opcode}
        assert swept == set(swept_dtypes(TABLE[opcode]))


def test_enough_cases_and_no_two_alike():
    """The commit suite's share of property 1."""
    assert len(CASES) >= MIN_CASES
    assert len({str(case) for case in CASES}) == len(CASES)


def test_some_cases_have_tokens_only_the_device_knows():
    """Else the slot's last token would never be read."""
    loads = [case for case in CASES if case.opcode is Opcode.LOAD_REQUEST_STATE]
    assert any(np.any(fill(case)["query"][:, 0] == LAST_TOKEN) for case in loads)


@ON_EVERY_TIER
def test_tier_has_every_defined_opcode(tier):
    """A tier that lacks an opcode cannot run a model that needs it."""
    assert tier.info.opcodes >= set(DEFINITIONS)


@ON_EVERY_TIER
def test_barrier_is_executable(tier):
    """The one opcode without operands lowers and runs."""
    run_barrier(tier)


@pytest.mark.parametrize("tier", TIERS)
def test_every_run_compares_every_opcode(tier):
    """Each opcode has a case on each tier that no marker puts off, and so has each storage type; on
    all but Vulkan each pair of them, in every shape that is swept."""
    found = {
        shape
        for shape, on, _ in (part.values for part in SHAPES_ON_TIERS if not part.marks)
        if on == tier
    }
    assert {PLACES[shape][0] for shape in found} == set(STRATEGIES)
    assert {PLACES[shape][1] for shape in found} == {PLACES[shape][1] for shape in SHAPES}
    assert found == (PLAYED if tier == "vulkan" else SWEPT)
    assert {PLACES[shape][:2] for shape in SWEPT} == {PLACES[shape][:2] for shape in SHAPES}
    assert {PLACES[shape][:2] for shape in SMALLEST} == {PLACES[shape][:2] for shape in SHAPES}


def test_a_part_has_every_shape_and_every_storage_type():
    """Of every opcode."""
    for requested in (slice(0, 2), slice(0, 3, 2)):
        every, swept = ({PLACES[name][requested] for name in names} for names in (SHAPES, SWEPT))
        assert swept == every
    assert len(SWEPT) < len(SHAPES)


def test_a_part_reads_stored_values_of_every_type():
    """One of its shapes at least is not the empty one."""
    filled = {
        name for name in SHAPES if all(SHAPES[name][0].sizes.get(n, 1) for n in ("tokens", "rows"))
    }
    assert {PLACES[name][:2] for name in SWEPT & filled} == {PLACES[name][:2] for name in SHAPES}


def test_of_the_longest_no_kind_of_values_is_left_out():
    """Each is swept; its other kinds are those of another shape of the same opcode and type, and
    soak has them of this one."""
    swept: dict[tuple[Opcode, object], set[str]] = defaultdict(set)
    for name in SWEPT - {*LONGEST}:
        for case in SHAPES[name]:
            swept[case.opcode, case.dtype].add(case.kind)
    for name in LONGEST:
        cases = SHAPES[name]
        assert name in SWEPT
        assert {case.kind for case in cases} <= swept[cases[0].opcode, cases[0].dtype]
        found = [case for part in (FEW, *OTHERS) for case in cases[part]]
        assert sorted(map(str, found)) == sorted(map(str, cases))
        assert {"normal", "zeros"} >= {case.kind for case in cases[FEW]}


@pytest.mark.parametrize(("shape", "tier", "part"), SHAPES_ON_TIERS, indirect=["tier"])
def test_parity(tier, shape, part):
    """Every element of every output and updated operand equals the definition's, whatever kind the
    operands' values are of."""
    problems = [
        f"{known.case}: {name}: {found}"
        for known in examples_of(shape)[part]
        for name, found in compare(tier, known).items()
    ]
    assert not problems, "\n".join(problems)
