"""The generation before: its code through its own registers, caches and flags of launches."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import numpy as np
import pytest

from accel.amd import pm4
from accel.amd.generation import GFX11, GFX12, PRIVILEGED
from accel.amd.isa.decode import GFX11 as ISA
from accel.amd.isa.decode import SCC, decode, opcodes
from accel.amd.isa.semantics import access, table
from accel.amd.runtime import Choices
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.sim.fake_machine import PROPERTIES, Behaviour
from accel.amd.system import findings
from accel.amd.tier import AmdTier
from accel.kernels.source import Module, modules
from contract.errors import CodecError, DeviceLost
from contract.kernel import encode_kernel
from harness.parity import Case, compare
from reference.cpu.tier import CpuTier
from reference.model.open import open_model
from tests.amd.code import shipped, words
from tests.amd.conftest import DRIVERS, OpenTier
from tests.amd.test_matrices import MANY
from tests.amd.test_model import SHORT
from tests.amd.test_parity import SMALL, part
from tests.kernels.test_parity import chosen
from tests.opencl.test_model import assert_same, generate

RDNA3 = PROPERTIES | {"gfx_target_version": 110000, "simd_count": 192}


def system(**more: object) -> FakeKernel:
    """A machine with such a GPU, reads of launches being checked."""
    given = {"properties": dict(RDNA3), "discovery": 11 << 16, "checked": True, **more}
    return FakeKernel(Behaviour(**given))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def old() -> Iterator[AmdTier]:
    """One tier for all cases."""
    kernel = system()
    with AmdTier(kernel=kernel) as opened:
        yield opened
    assert kernel.left_over == []


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_gpu_by_its_name(open_amd: OpenTier, driver: str) -> None:
    """Found, its packets tried, its self-test passed, whatever the kernel calls it."""
    kernel = system()
    kernel.behaviour.name = "ip discovery"
    tier = open_amd(kernel, DRIVERS[driver])
    assert tier.info.device == "gfx1100 (simulated)"
    assert tier._runtime.modules.native


@pytest.mark.parametrize("case", SMALL[::5], ids=str)
def test_parity(old: AmdTier, case: Case) -> None:
    assert compare(old, case) == {}


@pytest.mark.soak
@pytest.mark.parametrize("case", part(chosen("all"), "1/16"), ids=str)
def test_more_cases(old: AmdTier, case: Case) -> None:
    assert compare(old, case) == {}


@pytest.mark.soak
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_whole_model(open_amd: OpenTier, tiny_model_path: object, driver: str) -> None:
    """Every logit and token is the CPU tier's."""
    model = open_model(tiny_model_path)  # type: ignore[arg-type]
    expected = generate(model, CpuTier(), SHORT)
    assert_same(expected, generate(model, open_amd(system(), DRIVERS[driver]), SHORT))


def test_integers_in_place_of_division_and_root() -> None:
    kernel = system()
    with AmdTier(choices=Choices(native=False), kernel=kernel) as tier:
        for case in SMALL[::12]:
            assert compare(tier, case) == {}, str(case)
    assert kernel.left_over == []


def test_there_is_a_kernel_for_everything_but_matrix_instructions(open_amd: OpenTier) -> None:
    """Whose operands lie otherwise: steps of many tokens keep to packed dots."""
    assert all(shipped(str(module), GFX11) for module in modules(repeating=False))
    tier = open_amd(system())
    assert compare(tier, MANY[0]) == {}
    assert tier._runtime.multiplies() is False


def test_code_of_the_other_generation_is_refused(open_amd: OpenTier) -> None:
    tier = open_amd(system())
    with pytest.raises(CodecError, match="target GFX1201, not GFX1100"):
        tier.load_kernel(encode_kernel(shipped("add")))
    assert tier.load_kernel(encode_kernel(shipped("add", GFX11))).header.name == "add"


def test_launches_of_amdkfd_are_privileged(open_amd: OpenTier) -> None:
    """As its trap handler wants it; neither user queues nor the newer generation do."""
    for kernel, name, bits in ((system(), "t1", PRIVILEGED), (system(), "t2", 0),
                               (FakeKernel(), "t1", 0)):  # fmt: skip
        loaded = open_amd(kernel, name)._runtime.modules.kernel(Module("add"))
        assert loaded.header.rsrc1 & PRIVILEGED == bits


def test_a_cache_that_only_it_has_is_emptied(
    open_amd: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what is enough between launches of gfx12 is a fault here."""
    caches = GFX11.caches
    assert caches.acquire_level & pm4.GL1_INV
    assert not GFX12.caches.acquire_level & pm4.GL1_INV
    tier = open_amd(system())
    real = pm4.acquire_memory
    monkeypatch.setattr(pm4, "acquire_memory", lambda bits: real(bits & ~pm4.GL1_INV))
    with pytest.raises(DeviceLost, match="without ACQUIRE_MEM between"):
        compare(tier, MANY[0])


def test_firmware_of_its_own() -> None:
    """User queues want other versions of it."""
    versions = {"me": 2390, "pfp": 2530, "mec": 2600, "mes": 120}
    assert not [f for f in findings(system(firmware=versions), "t2") if f.remedy]
    old = [f for f in findings(system(firmware=versions | {"mec": 2599}), "t2") if f.remedy]
    assert [found.remedy for found in old] == ["update linux-firmware, user queues want 2600"]


@pytest.mark.parametrize("relation", ["eq", "lg", "gt", "ge", "lt", "le"])
def test_comparisons_with_a_constant(relation: str) -> None:
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


def test_a_comparison_reads_the_register_it_names() -> None:
    """S_CMPK_GT_I32 s5, 7 writes the condition alone."""
    number = next(n for (e, n), name in opcodes(ISA).items() if name == "s_cmpk_gt_i32")
    found = access(decode(words(0xB0000007 | number << 23 | 5 << 16), 0, ISA))
    assert (found.reads, found.writes) == ({5}, {SCC})
