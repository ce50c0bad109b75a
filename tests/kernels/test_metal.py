"""Metal texts, compiled as C++ and run one context an item, against the numpy definitions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from accel.kernels.source import Language, Module, module_source
from accel.opencl import runtime
from accel.opencl.tier import OpenClTier
from accel.packets.packet import PACKET
from harness.parity import Case, compare
from tests.kernels.metal_modules import MetalError, MetalLauncher, compiled
from tests.kernels.processor import cpu_device
from tests.kernels.test_parity import chosen
from tests.opencl.work_groups import work_group_tier


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenClTier]:
    """A tier of this process whose ops are C++."""
    folder = tmp_path_factory.mktemp("metal")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "ModuleLauncher", MetalLauncher)
        patch.setattr(MetalLauncher, "folder", folder, raising=False)
        with work_group_tier(cpu_device(), folder / "programs", shared_addresses=True) as opened:
            yield opened


@pytest.mark.parametrize("case", chosen("1"), ids=str)
def test_parity(tier: OpenClTier, case: Case) -> None:
    """A case of every opcode and storage type; weights are arranged by C++ too."""
    problems = compare(tier, case)
    assert not problems, "; ".join(f"{name}: {found}" for name, found in problems.items())


def test_an_error_is_found_where_it_is(tmp_path: Path) -> None:
    """The compiler names the kernel's file and line."""
    text = module_source(Language.METAL, Module("add")).replace("A(a) + A(b)", "A(a) +")
    with pytest.raises(MetalError, match=r"add\.k:6"):
        compiled(Module("add"), text, tmp_path)


def test_a_barrier_that_some_pass_by_is_noticed(tmp_path: Path) -> None:
    """The shim does not let items meet at different barriers."""
    text = module_source(Language.METAL, Module("self_test")).replace(
        "OPEN;", "if (ITEM > 5u) GROUP_BARRIER; OPEN;"
    )
    run = compiled(Module("self_test"), text, tmp_path)
    assert run(0, 0, np.zeros(1, PACKET).ctypes.data, 0, 1) == 0
