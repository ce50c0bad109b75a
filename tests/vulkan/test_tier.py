"""The Vulkan tier behind the contract: memory, kernels, errors, deadlines, a lost device."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from accel.packets import work
from accel.packets.rules import OPCODES
from accel.vulkan.api import Vulkan
from accel.vulkan.tier import VulkanTier
from contract.dtypes import F32, Q8_0
from contract.errors import DeviceLost, OutOfMemory, TierError
from contract.ir.graph import BufferDecl, BufferKind
from contract.ir.inputs import input_layout
from contract.opcodes import Opcode
from contract.shape_key import ShapeKey
from tests.doubling import (
    GRAPH,
    STATE,
    WIDTH,
    Doubling,
    inputs_of,
    run_doubling,
)
from tests.growth import refused_growth
from tests.quant.samples import random_blocks
from tests.vulkan.conftest import WAYS, Library, OpenTier


@pytest.mark.parametrize("way", WAYS)
def test_replays_read_new_inputs(open_vulkan: OpenTier, way: str) -> None:
    """One recording, many submissions: what the host writes is seen by the next one."""
    run_doubling(open_vulkan(base=WAYS[way]), rounds=6)


@pytest.mark.parametrize("shared", [True, False])
def test_a_step_is_one_submission(faulty: Vulkan, open_vulkan: OpenTier, shared: bool) -> None:
    """However many command buffers it is cut into, and nothing is recorded again for it once what
    the host maps is known."""
    tier = open_vulkan(faulty, shared=shared)
    lowered = Doubling(tier)
    lowered.run(2, requested=())
    calls: list[str] = []

    def counted(name: str) -> Any:
        return lambda real, *arguments: (calls.append(name), real(*arguments))[1]

    library = faulty.library
    assert isinstance(library, Library)
    for name in ("vkQueueSubmit", "vkBeginCommandBuffer", "vkCmdDispatch"):
        library.instead[name] = counted(name)
    lowered.run(5, requested=())
    assert calls == ["vkQueueSubmit"] * 5


def test_info_names_device_and_opcodes(tier: VulkanTier) -> None:
    """What a conformance package records."""
    info = tier.info
    assert (info.name, info.device) == ("vulkan", tier.device.name)
    assert info.driver.startswith(tier.device.driver)
    assert info.opcodes == OPCODES == frozenset(Opcode)
    assert info.arithmetic == "exact-2"


@pytest.mark.parametrize("shared", [True, False])
def test_memory_is_zeroed_and_state_is_kept(open_vulkan: OpenTier, shared: bool) -> None:
    """Mapped state keeps what the host wrote over a submission that does not touch it."""
    tier = open_vulkan(shared=shared)
    state = tier.alloc(STATE, 64)
    assert not tier.map(state).any()
    tier.map(state)[:] = 7
    run_doubling(tier)
    assert (tier.map(state) == 7).all()
    assert (tier.read(state, 3, 5) == 7).all()
    tier.free(state)


def test_upload_holds_the_bytes(tier: VulkanTier) -> None:
    """A weight's bytes can be read back."""
    data = random_blocks(Q8_0, 64, 256, 5)
    decl = BufferDecl("w", BufferKind.WEIGHT, Q8_0, (64, 256), "w")
    buffer = tier.upload(decl, data)
    assert np.array_equal(tier.map(buffer).reshape(data.shape), data)
    tier.free(buffer)


@pytest.mark.parametrize("shared", [True, False])
def test_out_of_memory_says_need_and_have(open_vulkan: OpenTier, shared: bool) -> None:
    """Nothing is allocated when it does not fit, and what was freed can be had again."""
    limit = 100 << 20
    tier = open_vulkan(shared=shared, memory_bytes=limit)
    before = tier.used_bytes
    first = tier.alloc(STATE, 60 << 20)
    with pytest.raises(OutOfMemory, match=r"state: need 62,914,560 bytes") as caught:
        tier.alloc(STATE, 60 << 20)
    assert 0 < caught.value.free <= limit - before - (60 << 20)
    decl = BufferDecl("w", BufferKind.CONSTANT, F32, (1, 15 << 20))
    with pytest.raises(OutOfMemory, match="w: need"):
        tier.upload(decl, np.zeros((1, 60 << 20), np.uint8))
    tier.free(first)
    assert tier.used_bytes == before
    tier.free(tier.alloc(STATE, 60 << 20))


@pytest.mark.parametrize("shared", [True, False])
def test_dropped_batches_give_their_memory_back(open_vulkan: OpenTier, shared: bool) -> None:
    """A form that is forgotten leaves nothing behind."""
    tier = open_vulkan(shared=shared)
    run_doubling(tier)
    before = tier.used_bytes
    for _ in range(5):
        run_doubling(tier)
    assert tier.used_bytes == before


def test_scratch_that_moves_is_followed(tier: VulkanTier) -> None:
    """A larger graph moves what all share: batches recorded before go on with it."""
    first = Doubling(tier)
    first.run()
    largest = ShapeKey(2000, 0)
    layout = input_layout(GRAPH, largest)
    y = tier.alloc(GRAPH.buffers["y"], 2000 * WIDTH * 4)
    tier.lower(GRAPH, {"y": y}, largest, layout)
    first.run(4)


@pytest.mark.parametrize("what", ["scratch", "inputs of a step"])
def test_what_steps_share_stays_when_it_cannot_grow(
    tier: VulkanTier, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches lowered before still use it."""
    refused_growth(tier, tier._memory, what, monkeypatch)


@pytest.mark.parametrize("most", [1, 1 << 60])
def test_long_steps_are_cut(
    faulty: Vulkan, open_vulkan: OpenTier, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A batch an op, or one for all: the same results, from one call."""
    monkeypatch.setattr(work, "BATCH_WORK", most)
    tier = open_vulkan(faulty)
    lowered = Doubling(tier)
    counts: list[int] = []

    def counted(real: Any, queue: Any, count: int, *rest: Any) -> int:
        counts.append(count)
        return int(real(queue, count, *rest))

    library = faulty.library
    assert isinstance(library, Library)
    lowered.run()
    library.instead["vkQueueSubmit"] = counted
    lowered.run(3)
    assert counts == [2 if most == 1 else 1] * 3


def lost(tier: VulkanTier, lowered: Doubling) -> None:
    """Every way to use the tier now says that its device is lost."""
    values = np.zeros((1, WIDTH), np.float32)
    with pytest.raises(DeviceLost):
        tier.submit(lowered.batch, inputs_of(values))
    with pytest.raises(DeviceLost):
        tier.alloc(STATE, 64)
    tier.free(lowered.y)
    tier.close()


@pytest.mark.parametrize("function", ["vkQueueSubmit", "vkWaitSemaphores"])
def test_a_lost_device_stays_lost(faulty: Vulkan, open_vulkan: OpenTier, function: str) -> None:
    """At submission or while waiting: a clear error, then and ever after; another tier opens."""
    tier = open_vulkan(faulty)
    lowered = Doubling(tier)
    lowered.run()
    library = faulty.library
    assert isinstance(library, Library)
    library.instead[function] = lambda real, *a: faulty.constant("ERROR_DEVICE_LOST")
    with pytest.raises(DeviceLost, match=rf"{function} gave VK_ERROR_DEVICE_LOST"):
        lowered.run()
    library.instead.clear()
    lost(tier, lowered)
    run_doubling(open_vulkan())


@pytest.mark.parametrize("shared", [True, False])
def test_a_step_that_does_not_end_in_time_loses_the_device(
    faulty: Vulkan, open_vulkan: OpenTier, shared: bool
) -> None:
    """The deadline is the caller's."""
    tier = open_vulkan(faulty, shared=shared)
    lowered = Doubling(tier)
    lowered.run(2)
    library = faulty.library
    assert isinstance(library, Library)
    library.instead["vkWaitSemaphores"] = lambda real, *a: faulty.constant("TIMEOUT")
    fence = tier.submit(lowered.batch, inputs_of(np.zeros((1, WIDTH), np.float32)))
    with pytest.raises(DeviceLost, match=r"did not end within 0.25 s"):
        tier.wait(fence, 0.25)
    library.instead.clear()
    while not fence.done:
        time.sleep(0.001)
    lost(tier, lowered)


def test_pipelines_the_driver_cannot_make(faulty: Vulkan, open_vulkan: OpenTier) -> None:
    """Out of memory names what was lowered; the tier goes on once there is some again."""
    tier = open_vulkan(faulty, cache=None)
    library = faulty.library
    assert isinstance(library, Library)
    for name, error in (("ERROR_OUT_OF_HOST_MEMORY", OutOfMemory), ("ERROR_UNKNOWN", TierError)):
        result = faulty.constant(name)
        library.instead["vkCreateComputePipelines"] = lambda real, *a, result=result: result
        with pytest.raises(error, match=f"packets of doubling.*{name}"):
            Doubling(tier)
    library.instead.clear()
    run_doubling(tier)


def test_closing_twice_is_harmless(open_vulkan: OpenTier) -> None:
    tier = open_vulkan()
    run_doubling(tier)
    tier.close()
    tier.close()
