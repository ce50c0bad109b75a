"""Metal texts as C++: errors where they are, barriers that all items meet, faults."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accel.kernels.source import Language, Module, module_source
from accel.metal.fake_compiler import CompileError
from accel.packets.packet import PACKET
from tests.kernels.metal_modules import compiled

SELF_TEST = module_source(Language.METAL, Module("self_test"))
ONE = "OPEN;"


def test_an_error_is_found_where_it_is(kernel_cache: Path) -> None:
    """The compiler names the kernel's file and line."""
    text = module_source(Language.METAL, Module("add")).replace("A(a) + A(b)", "A(a) +")
    with pytest.raises(CompileError, match=r"add\.k:6"):
        compiled(Module("add"), text, kernel_cache)


@pytest.mark.parametrize(
    "condition", ["ITEM > 5u", "ITEM == 0u", "ITEM != 0u", "GROUP == 1u && ITEM > 9u"]
)
def test_a_barrier_that_some_pass_by_is_noticed(kernel_cache: Path, condition: str) -> None:
    """Whichever items they are."""
    text = SELF_TEST.replace(ONE, f"if ({condition}) GROUP_BARRIER; {ONE}")
    run = compiled(Module("self_test"), text, kernel_cache)
    assert not run(np.zeros(1, PACKET).ctypes.data, 2)


@pytest.mark.parametrize("condition", ["true", "GROUP == 1u"])
def test_a_barrier_that_all_meet_is_none(kernel_cache: Path, condition: str) -> None:
    """In all groups, or in one of them."""
    text = SELF_TEST.replace(ONE, f"if ({condition}) {{ GROUP_BARRIER; GROUP_BARRIER; }} {ONE}")
    run = compiled(Module("self_test"), text, kernel_cache)
    assert run(np.zeros(1, PACKET).ctypes.data, 2)
