"""Machines without a GPU that can be used: what is missing is said, nothing is left behind."""

import errno

import pytest

from accel.amd.device import Device
from accel.amd.kernel import Kernel
from accel.amd.kfd import KFD
from accel.amd.queue import Queue
from accel.amd.runtime import DRIVERS
from accel.amd.sim.fake_kernel import RENDER, FakeKernel
from accel.amd.sim.fake_machine import PROPERTIES, Behaviour
from accel.amd.tier import AmdTier
from accel.amd.topology import NODES, Gpu
from accel.amd.userq import DRI
from contract.errors import OutOfMemory, TierUnavailable
from harness.tiers import TierOptions, open_tier

MACHINES: dict[str, tuple[Behaviour, str]] = {
    "no driver": (Behaviour(errors={KFD: errno.ENOENT}), "there is no /dev/kfd; load the amdgpu"),
    "no right": (Behaviour(errors={KFD: errno.EACCES}), "may not be opened; add yourself to"),
    "no render node": (Behaviour(errors={RENDER: errno.EACCES}), "renderD128 may not be opened"),
    "reset": (Behaviour(errors={KFD: errno.EAGAIN}), "is being reset; try again"),
    "broken": (Behaviour(errors={KFD: errno.EIO}), "/dev/kfd: .* see dmesg"),
    "old": (Behaviour(version=(1, 3)), "amdkfd speaks 1.3, not 1.6; update the kernel"),
    "new": (Behaviour(version=(2, 0)), "amdkfd speaks 2.0"),
    "no node": (Behaviour(errors={NODES: errno.ENOENT}), "there is no AMD GPU"),
    "other GPU": (
        Behaviour(properties=PROPERTIES | {"gfx_target_version": 90402}),
        r"no kernels for gfx942 \(gfx942\); there are some for gfx1200, gfx1201, gfx1100",
    ),
    "small BAR": (Behaviour(public=False), "does not see all memory .* enable resizable BAR"),
    "no memory": (Behaviour(memory_bytes=1 << 16), "cannot be used: .* free the GPU"),
    "no queue": (Behaviour(errors={"CREATE_QUEUE": errno.ENOMEM}), "cannot be used"),
    "no VM": (Behaviour(errors={"ACQUIRE_VM": errno.EBUSY}), "cannot be used"),
    "no event": (Behaviour(errors={"CREATE_EVENT": errno.ENOSPC}), "cannot be used"),
}
"""By amdkfd."""
BY_USER_QUEUES: dict[str, tuple[Behaviour, str]] = {
    "no driver": (Behaviour(errors={DRI: errno.ENOENT}), "no render node in /dev/dri; load the"),
    "no right": (Behaviour(errors={RENDER: errno.EACCES}), "renderD128 may not be opened; add you"),
    "another driver": (Behaviour(drm_driver="i915"), "there is no AMD GPU"),
    "old": (Behaviour(drm_version=(3, 63)), "amdgpu speaks 3.63, not 3.64; update the kernel"),
    "new": (Behaviour(drm_version=(4, 0)), "amdgpu speaks 4.0"),
    "other GPU": (Behaviour(discovery=10 << 16), r"no kernels for gfx1000 \(gfx1000\)"),
    "small BAR": (Behaviour(public=False), "does not see all memory .* enable resizable BAR"),
    "no memory": (Behaviour(memory_bytes=1 << 16), "cannot be used: .* free the GPU"),
    "no slots": (
        Behaviour(slots=0),
        "compute_userq_slots_missing: .*boot with amdgpu.user_queue=1",
    ),
    "no engine": (
        Behaviour(engines=0b101),
        "no user queues for compute; boot with amdgpu.user_queue=1",
    ),
    "no ioctl": (
        Behaviour(errors={"USERQ": errno.EINVAL}),
        "gfx1201: .*USERQ; boot with amdgpu.user_queue=1",
    ),
    "all taken": (Behaviour(errors={"USERQ": errno.ENOMEM}), "cannot be used: .*USERQ; free"),
    "no context": (Behaviour(errors={"CTX": errno.ENOMEM}), "cannot be used"),
    "no syncobj": (Behaviour(errors={"SYNCOBJ_CREATE": errno.ENOMEM}), "cannot be used"),
    "no answer": (Behaviour(errors={"INFO": errno.EIO}), "renderD128: .*INFO; see dmesg"),
    "no page tables": (Behaviour(errors={"SYNCOBJ_TIMELINE_WAIT": errno.ETIME}), "cannot be used"),
}


@pytest.mark.parametrize(
    ("name", "behaviour", "problem"),
    [
        *(pytest.param("t1", *one, id=f"{what}-t1") for what, one in MACHINES.items()),
        *(pytest.param("t2", *one, id=f"{what}-t2") for what, one in BY_USER_QUEUES.items()),
    ],
)
def test_what_is_missing_is_said(name, behaviour, problem):
    kernel = FakeKernel(behaviour)
    with pytest.raises(TierUnavailable, match=problem):
        AmdTier(kernel=kernel, tier=name)
    behaviour.errors.clear()
    assert kernel.leaked == []


def test_a_device_of_another_name(name):
    kernel = FakeKernel()
    with pytest.raises(TierUnavailable, match="no AMD GPU is named 'navi'; GPUs here: gfx1201"):
        AmdTier("navi", kernel=kernel, tier=name)
    assert kernel.leaked == []


def test_this_machine_or_the_simulated_one(name):
    """By name, as the command line asks for it."""
    with open_tier(name, TierOptions(device="simulated")) as tier:
        assert tier.info.device == "gfx1201 (simulated)"
        assert tier.info.name == name
    try:
        Kernel().open(KFD)
    except FileNotFoundError:
        with pytest.raises(TierUnavailable, match="--device simulated needs no GPU"):
            open_tier(name)


def test_the_smaller_card_of_the_family(name):
    """gfx1200: another save area, the same code."""
    half = PROPERTIES | {"gfx_target_version": 120000, "simd_count": 64}
    kernel = FakeKernel(Behaviour(properties=half, discovery=12 << 16))
    with AmdTier(kernel=kernel, tier=name) as tier:
        assert tier.info.device == "gfx1200 (simulated)"
    assert kernel.leaked == []


def test_a_process_that_opens_the_tier_again():
    """amdkfd gives a process one address space, that of the file it came with first."""
    kernel = FakeKernel()
    for _ in range(2):
        AmdTier(kernel=kernel).close()
    assert kernel.calls["RUNTIME_ENABLE"] == 1
    assert kernel.leaked == []
    kernel.open_files.clear()
    with pytest.raises(TierUnavailable, match="this process has one"):
        AmdTier(kernel=kernel)


@pytest.mark.parametrize(
    ("compute_units", "sizes"),
    [
        (64, (0x7000, 0x1D47000, 0x1D57000)),
        (32, (0x4000, 0xEA4000, 0xEAC000)),
        (96, (0xA000, 0x2BEA000, 0x2C02000)),
    ],
)
def test_sizes_of_a_queue(compute_units, sizes):
    """As the kernel's own table has them; where it states its sizes, those count."""
    properties = {"simd_count": 2 * compute_units, "simd_per_cu": 2}
    gpu = Gpu("1", 1, "", properties, 0)
    assert (gpu.control_stack_bytes, gpu.save_bytes, gpu.save_area_bytes) == sizes
    stated = Gpu("1", 1, "", properties | {"ctl_stack_size": 4096, "cwsr_size": 8192}, 0)
    assert (stated.control_stack_bytes, stated.save_bytes) == (4096, 8192)


REQUESTS = {"t1": ("ALLOC_MEMORY_OF_GPU", "MAP_MEMORY_TO_GPU"), "t2": ("GEM_CREATE", "GEM_VA")}


def test_memory_that_does_not_fit_is_named(name):
    kernel = FakeKernel(Behaviour(memory_bytes=1 << 20))
    device = Device(kernel, DRIVERS[name](kernel, ""))
    kept = device.allocate("first", 1 << 19)
    with pytest.raises(OutOfMemory, match="second"):
        device.allocate("second", 1 << 20)
    allocate, map_it = REQUESTS[name]
    kernel.behaviour.errors[allocate] = errno.ENOMEM
    with pytest.raises(OutOfMemory, match="third"):
        device.allocate("third", 1)
    kernel.behaviour.errors.clear()
    kernel.behaviour.errors[map_it] = errno.EINVAL
    with pytest.raises(OSError, match=map_it):
        device.allocate("fourth", 1)
    kernel.behaviour.errors.clear()
    assert device.held == kept.reserved
    device.close()
    assert kernel.leaked == []


def test_a_ring_is_gone_through_many_times(name):
    """Packets straddle its end; numbers of fences stay in order; no system call is made."""
    kernel = FakeKernel()
    device = Device(kernel, DRIVERS[name](kernel, ""))
    queue = Queue(device)
    calls = kernel.calls.total()
    for number in range(1, 5000):
        assert queue.submit([]) == number
    assert queue.fence == 4999
    assert kernel.calls.total() == calls
    queue.close()
    device.close()
    assert kernel.leaked == []
