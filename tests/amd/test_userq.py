"""User queues: what is missing is said, and the simulated driver refuses what the real one does."""

import errno
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np
import pytest

from accel.amd import pm4, userq
from accel.amd import uapi_drm as drm
from accel.amd.device import Device
from accel.amd.queue import Queue
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.sim.fake_machine import Behaviour
from accel.amd.tier import AmdTier
from accel.amd.uapi import Request
from accel.amd.uapi_drm import Domain
from accel.amd.userq import UserQueues
from contract.errors import DeviceLost, TierUnavailable
from tests.patience import PATIENCE_SECONDS


@pytest.mark.parametrize(
    "behaviour",
    [Behaviour(errors={"INFO UQ_FW_AREAS": errno.EINVAL}), Behaviour(errors={"INFO DEV_INFO": 5})],
    ids=["areas", "engines"],
)
def test_questions_an_older_kernel_does_not_answer(behaviour):
    """What counts is whether a queue can be had."""
    with AmdTier(kernel=FakeKernel(behaviour), tier="t2") as tier:
        assert tier.info.driver == "amdgpu 3.64"


class Spoiled(FakeKernel):
    """Changes a request on its way."""

    changes: Mapping[str, int] = MappingProxyType({})

    def ioctl(self, file: int, request: Request, argument: np.ndarray) -> None:
        creates = request is drm.USERQ and int(argument["op"][0]) == drm.USERQ_CREATE
        for name, value in self.changes.items() if creates else ():
            argument[name] = value
        super().ioctl(file, request, argument)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ip_type": 0}, "a compute queue"),
        ({"queue_size": 3 << 12}, "power of two"),
        ({"queue_size": 1 << 11}, "power of two"),
        ({"queue_va": 0x1000}, "ring in mapped"),
        ({"rptr_va": 0x1000}, "read pointer"),
        ({"wptr_va": 0x1000}, "write pointer"),
        ({"doorbell_handle": 1}, "a doorbell"),
        ({"doorbell_offset": 512}, "a doorbell"),
        ({"mqd_size": 16}, "a descriptor"),
        ({"flags": 3}, "priority"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_queue_that_is_refused(changes, problem, monkeypatch):
    """Negative controls: one thing of a good request changed."""
    monkeypatch.setattr(Spoiled, "changes", changes)
    kernel = Spoiled()
    with pytest.raises(TierUnavailable, match=problem):
        AmdTier(kernel=kernel, tier="t2")
    assert kernel.leaked == []


@pytest.fixture
def machine() -> Iterator[tuple[FakeKernel, Device]]:
    """A device of the simulated driver, which has everything back after the test."""
    kernel = FakeKernel()
    device = Device(kernel, UserQueues(kernel, ""))
    yield kernel, device
    device.close()
    assert kernel.leaked == []


def test_a_queue_says_goodbye(machine):
    """The driver's own fence follows the last packet, and is waited for."""
    kernel, device = machine
    queue = Queue(device)
    queue.wait(queue.submit([]), PATIENCE_SECONDS)
    assert kernel.calls["USERQ_SIGNAL"] == 0
    queue.close()
    assert (kernel.calls["USERQ_SIGNAL"], kernel.calls["SYNCOBJ_WAIT"]) == (1, 1)


def test_a_fence_that_is_not_signalled(machine, monkeypatch):
    """Negative control: without the packet the driver does not know that the ring was read."""
    _, device = machine
    queue = Queue(device)
    queue.wait(queue.submit([]), PATIENCE_SECONDS)
    with pytest.raises(OSError, match="SYNCOBJ_WAIT"):
        queue._driver.settle()
    queue.close()


def test_packets_of_the_other_tier_are_refused(machine):
    """INDIRECT_BUFFER of a user queue names the descriptor's address space."""
    _, device = machine
    queue = Queue(device)
    buffer = device.allocate("buffer", 4, device=False)
    buffer.host.view(np.uint32)[0] = pm4.PADDING
    queue.wait(queue.submit(queue.indirect_buffer(buffer.address, 1)), PATIENCE_SECONDS)
    with pytest.raises(DeviceLost, match="INDIRECT_BUFFER"):
        queue.wait(queue.submit(pm4.indirect_buffer(buffer.address, 1)), PATIENCE_SECONDS)
    queue.close()


def test_memory_is_there_once_page_tables_have_it(machine, monkeypatch):
    """Negative control: the wait for the timeline is left out."""
    _, device = machine
    queue = Queue(device)
    call = UserQueues.call

    def hasty(self: UserQueues, request: Request, **values: int) -> np.ndarray:
        if request is drm.SYNCOBJ_TIMELINE_WAIT:
            return request.argument()
        return call(self, request, **values)

    monkeypatch.setattr(UserQueues, "call", hasty)
    buffer = device.allocate("buffer", 4, device=False)
    monkeypatch.undo()
    with pytest.raises(DeviceLost, match="are not mapped"):
        queue.wait(queue.submit(queue.indirect_buffer(buffer.address, 1)), PATIENCE_SECONDS)
    device.allocate("another", 4)
    queue.close()


def test_what_the_driver_refuses(machine):
    """Objects, addresses and fences of requests the tier does not make."""
    _, device = machine
    driver = device.driver
    assert isinstance(driver, UserQueues)
    held = device.allocate("held", 1)
    whole = int(userq.WHOLE)
    refused: list[tuple[Request, dict[str, int], int]] = [
        (drm.GEM_CREATE, {"bo_size": 0, "domains": 2}, errno.EINVAL),
        (drm.GEM_CREATE, {"bo_size": 4096, "domains": 1}, errno.EINVAL),
        (drm.GEM_CREATE, {"bo_size": 1 << 40, "domains": 4}, errno.ENOMEM),
        (drm.GEM_MMAP, {"handle": 1}, errno.ENOENT),
        (drm.GEM_CLOSE, {"handle": 1}, errno.ENOENT),
        (drm.GEM_VA, {"handle": held.handle, "va_address": 1, "flags": whole}, errno.EINVAL),
        (drm.CTX, {"op": drm.CTX_FREE, "ctx_id": 1}, errno.EINVAL),
        (drm.USERQ, {"op": 7}, errno.EINVAL),
        (drm.USERQ, {"op": drm.USERQ_FREE, "queue_id": 9}, errno.ENOENT),
        (drm.USERQ, {"op": drm.USERQ_FREE, "queue_id": 1, "flags": 1}, errno.EINVAL),
        (drm.USERQ_SIGNAL, {"queue_id": 9}, errno.ENOENT),
    ]
    for request, values, number in refused:
        with pytest.raises(OSError, match=r"\w") as caught:
            driver.call(request, **values)
        assert caught.value.errno == number, request.name
    doorbells = driver.create(4096, Domain.DOORBELL)
    with pytest.raises(OSError, match="GEM_VA: flags"):
        driver._map_for_gpu(doorbells, held.address, 4096)
    driver.call(drm.GEM_CLOSE, handle=doorbells)


def test_a_lost_gpu_is_told(name):
    """Another program's fault resets the GPU; the tier says so and gives all back."""
    kernel = FakeKernel()
    tier = AmdTier(kernel=kernel, tier=name)
    kernel.behaviour.packets = 0
    queue = tier._runtime.queue
    number = queue.submit([])
    kernel.reset()
    with pytest.raises(DeviceLost, match=r"the GPU was reset \(reset\)"):
        queue.wait(number, PATIENCE_SECONDS)
    tier.close()
    assert kernel.leaked == []
