"""Cases of the parity suite through messages, commands and C++ of the Metal texts.

One of every opcode and of every storage type; ZINC_RT_PARITY_CASES asks for so many of each pair,
or for all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel.kernels import source
from accel.kernels.source import Traits
from accel.metal.tier import MetalTier
from contract.dtypes import F32, Q4_K
from contract.opcodes import Opcode
from harness.parity import Case, compare
from tests.kernels.test_parity import ELSEWHERE, chosen, each_somewhere
from tests.metal.conftest import OpenTier, new_mac
from tests.parity.test_parity import SHAPES

pytestmark = pytest.mark.parity

MOST = os.environ.get("ZINC_RT_PARITY_CASES", "")
CASES = chosen(MOST) if MOST else each_somewhere(chosen("1"))
INTEGERS = Traits(divide=False, root=False, half=False)


@pytest.fixture(scope="module")
def parity_tier(kernel_cache: Path) -> Iterator[MetalTier]:
    """One tier for all its cases."""
    mac = new_mac(kernel_cache)
    with MetalTier(metal=mac.metal) as opened:
        yield opened
    assert (mac.problems, mac.left_over) == ([], [])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(parity_tier: MetalTier, case: Case) -> None:
    """Every element of every output and updated operand equals the definition's."""
    problems = compare(parity_tier, case)
    assert not problems, "; ".join(f"{name}: {found}" for name, found in problems.items())


@pytest.mark.soak
@pytest.mark.parametrize("shape", SHAPES)
def test_all(parity_tier: MetalTier, shape: str) -> None:
    """Every case of the suite."""
    for case in SHAPES[shape]:
        assert compare(parity_tier, case) == {}, str(case)


def test_integers_in_place_of_division_and_root(open_metal: OpenTier) -> None:
    tier = open_metal(traits=INTEGERS)
    for case in chosen("1"):
        if case.opcode in ELSEWHERE and case.dtype in (None, F32, Q4_K):
            assert compare(tier, case) == {}, str(case)


def test_older_compile_options(kernel_cache: Path) -> None:
    """Before macOS 15 fast mathematics are turned off by another message."""
    mac = new_mac(kernel_cache, math_mode=False)
    with MetalTier(metal=mac.metal) as tier:
        for case in CASES[::8]:
            assert compare(tier, case) == {}, str(case)
    assert (mac.problems, mac.left_over) == ([], [])


def test_a_wrong_kernel_is_noticed(open_metal: OpenTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """One addition turned round fails."""
    stored = source._file
    monkeypatch.setattr(
        source, "_file", lambda name: stored(name).replace("A(a) + A(b)", "A(a) - A(b)")
    )
    tier = open_metal()
    cases = [case for case in chosen("1") if case.opcode is Opcode.ADD]
    assert any(compare(tier, case) for case in cases)
