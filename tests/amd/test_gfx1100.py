"""The generation before: its code through its own registers, caches and flags of launches."""

import operator

import numpy as np
import pytest

from accel.amd import pm4
from accel.amd.generation import GFX11, GFX12, PRIVILEGED
from accel.amd.isa.decode import GFX11 as ISA
from accel.amd.isa.decode import SCC, decode, opcodes
from accel.amd.isa.semantics import access, table
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.system import findings
from accel.kernels.source import Module, modules
from contract.errors import DeviceLost
from harness.parity.execute import compare
from reference.cpu.tier import CpuTier
from reference.model.open import open_model
from tests.amd.code import shipped, words
from tests.amd.conftest import DRIVERS
from tests.amd.test_matrices import MANY
from tests.kernels.machines import gfx1100
from tests.model_runs import FEW, assert_same, generate


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_gpu_by_its_name(open_amd, driver):
    """Found, its packets tried, its self-test passed, whatever the kernel calls it."""
    kernel = gfx1100()
    kernel.behaviour.name = "ip discovery"
    tier = open_amd(kernel, DRIVERS[driver])
    assert tier.info.device == "gfx1100 (simulated)"
    assert tier._runtime.modules.native


@pytest.mark.soak
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_whole_model(open_amd, tiny_model_path, driver):
    """Every logit and token is the CPU tier's."""
    model = open_model(tiny_model_path)  # type: ignore[arg-type]
    expected = generate(model, CpuTier(), FEW)
    assert_same(expected, generate(model, open_amd(gfx1100(), DRIVERS[driver]), FEW))


def test_there_is_a_kernel_for_everything_but_matrix_instructions(open_amd):
    """Whose operands lie otherwise: steps of many tokens keep to packed dots."""
    assert all(shipped(str(module), GFX11) for module in modules(repeating=False))
    tier = open_amd(gfx1100())
    assert compare(tier, MANY[0]) == {}
    assert tier._runtime.uses_matrices() is False


def test_launches_of_amdkfd_are_privileged(open_amd):
    """As its trap handler wants it; neither user queues nor the newer generation do."""
    for kernel, name, bits in ((gfx1100(), "t1", PRIVILEGED), (gfx1100(), "t2", 0),
                               (FakeKernel(), "t1", 0)):  # fmt: skip
        loaded = open_amd(kernel, name)._runtime.modules.kernel(Module("add"))
        assert loaded.header.rsrc1 & PRIVILEGED == bits


def test_a_cache_that_only_it_has_is_emptied(open_amd, monkeypatch):
    """Negative control: what is enough between launches of gfx12 is a fault here."""
    caches = GFX11.caches
    assert caches.acquire_level & pm4.GL1_INV
    assert not GFX12.caches.acquire_level & pm4.GL1_INV
    tier = open_amd(gfx1100())
    real = pm4.acquire_memory
    monkeypatch.setattr(pm4, "acquire_memory", lambda bits: real(bits & ~pm4.GL1_INV))
    with pytest.raises(DeviceLost, match="without ACQUIRE_MEM between"):
        compare(tier, MANY[0])


def test_firmware_of_its_own():
    """User queues want other versions of it."""
    versions = {"me": 2390, "pfp": 2530, "mec": 2600, "mes": 120}
    assert not [f for f in findings(gfx1100(firmware=versions), "t2") if f.remedy]
    old = [f for f in findings(gfx1100(firmware=versions | {"mec": 2599}), "t2") if f.remedy]
    assert [found.remedy for found in old] == ["update linux-firmware, user queues want 2600"]


@pytest.mark.parametrize("relation", ["eq", "lg", "gt", "ge", "lt", "le"])
def test_comparisons_with_a_constant(relation):
    """The constant has a sign in a comparison of signed numbers, and none in the other."""
    compare_them = {"lg": operator.ne}.get(relation) or getattr(operator, relation)
    for kind, bucket in (("i", np.int32), ("u", np.uint32)):
        row = table()[f"s_cmpk_{relation}_{kind}32"]
        assert row.sources == f"{kind}k"
        for value, constant in ((-5, -5), (-5, 3), (3, -5), (3, 3), (70_000, 3), (65_531, -5)):
            a = np.array([value], np.int64).astype(bucket)
            b = np.array([constant], np.int64).astype(np.uint32)
            found = eval(row.expressions[0], {"a": a, "b": b, "i32": np.int32})
            number = constant if kind == "i" else constant & 0xFFFF
            assert bool(found[0]) is compare_them(int(a[0]), number), (kind, value, constant)


def test_a_comparison_reads_the_register_it_names():
    """S_CMPK_GT_I32 s5, 7 writes the condition alone."""
    number = next(n for (e, n), name in opcodes(ISA).items() if name == "s_cmpk_gt_i32")
    found = access(decode(words(0xB0000007 | number << 23 | 5 << 16), 0, ISA))
    assert (found.reads, found.writes) == ({5}, {SCC})
