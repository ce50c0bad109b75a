"""Cases of the parity suite through packets, command processor and machine code.

One of every opcode and of every storage type; ZINC_RT_PARITY_CASES asks for so many of each pair.
All are the soak tests, half an hour of one core; ZINC_RT_PARITY_PART=3/8 is the third of eight
parts, each of which has every eighth case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from accel.amd.runtime import Choices
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.sim.fake_machine import Behaviour
from accel.amd.tier import AmdTier
from contract.opcodes import Opcode
from harness.parity import Case, compare
from tests.kernels.test_parity import ELSEWHERE, chosen, each_somewhere
from tests.parity.test_parity import by_shape

pytestmark = pytest.mark.parity

MOST = os.environ.get("ZINC_RT_PARITY_CASES", "")
SLOW = (Opcode.SHARED_EXPERT, Opcode.FLASH_ATTN_BATCHED, Opcode.MOE_GATE_UP, Opcode.MOE_DOWN_ACC)
"""Of these one storage type is enough for every commit: their kernels are in other opcodes too."""


def fast(cases: list[Case]) -> Iterator[Case]:
    """All, but of slow opcodes a single one."""
    met = set()
    for case in cases:
        if case.opcode in SLOW and case.opcode in met:
            continue
        met.add(case.opcode)
        yield case


CASES = chosen(MOST) if MOST else list(fast(each_somewhere(chosen("1"))))
SMALL = [case for case in CASES if case.opcode in ELSEWHERE and case.opcode not in SLOW]


@pytest.fixture(scope="module")
def tier() -> Iterator[AmdTier]:
    """One tier for all its cases, reads of launches being checked."""
    kernel = FakeKernel(Behaviour(checked=True))
    with AmdTier(kernel=kernel) as opened:
        yield opened
    assert kernel.left_over == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(tier: AmdTier, case: Case) -> None:
    """Every element of every output and updated operand equals the definition's."""
    problems = compare(tier, case)
    assert not problems, "; ".join(f"{name}: {found}" for name, found in problems.items())


def part(cases: list[Case], named: str) -> list[Case]:
    """Every n-th of them, from the k-th on, for "k/n" with 1 <= k <= n."""
    number, parts = (int(word) for word in named.split("/"))
    assert 1 <= number <= parts, f"ZINC_RT_PARITY_PART={named}"
    return cases[number - 1 :: parts]


ASKED_FOR = by_shape(part(chosen("all"), os.environ.get("ZINC_RT_PARITY_PART", "1/1")))


def test_parts_are_the_whole() -> None:
    cases = chosen("all")
    assert sorted(map(str, cases)) == sorted(
        str(case) for number in (1, 2, 3) for case in part(cases, f"{number}/3")
    )


@pytest.mark.soak
@pytest.mark.parametrize("shape", ASKED_FOR)
def test_all(tier: AmdTier, shape: str) -> None:
    for case in ASKED_FOR[shape]:
        assert compare(tier, case) == {}, str(case)


def test_user_queues() -> None:
    """The other driver's ring and memory under the same packets."""
    kernel = FakeKernel(Behaviour(checked=True))
    with AmdTier(kernel=kernel, tier="t2") as tier:
        for case in SMALL[::3]:
            assert compare(tier, case) == {}, str(case)
    assert kernel.left_over == []


def test_integers_in_place_of_division_and_root() -> None:
    with AmdTier(choices=Choices(native=False), kernel=FakeKernel()) as tier:
        for case in SMALL[::4]:
            assert compare(tier, case) == {}, str(case)
