"""Metal texts as C++: errors where they are, barriers that all items meet, faults."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from accel.kernels.source import Language, Module, module_source
from accel.metal.sim import fake_compiler
from accel.metal.sim.fake_compiler import HEADER, SHIM, CompileError, FakeCompiler
from accel.packets.packet import PACKET
from tests.kernels.metal_modules import compiled
from tests.needs import need_device

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


def test_headers_are_kept_until_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the compiler read them once, for kernels with the same options."""
    shim, cache = tmp_path / "shim", tmp_path / "cache"
    shutil.copytree(SHIM, shim)
    monkeypatch.setattr(fake_compiler, "SHIM", shim)
    compiler = FakeCompiler(cache)
    first = need_device(lambda: compiler.kernel(SELF_TEST, fast=False))
    assert compiler.kernel(SELF_TEST, fast=False) == first
    assert len(list(cache.glob(f"*/{HEADER}.gch"))) == 1
    header = shim / HEADER
    header.write_text(header.read_text() + '\n#error "another header"\n')
    with pytest.raises(CompileError, match="another header"):
        compiler.kernel(SELF_TEST, fast=False)
    assert len(list(cache.iterdir())) == 2
