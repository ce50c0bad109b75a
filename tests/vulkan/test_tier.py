"""The Vulkan tier behind the contract: memory, kernels, errors, deadlines, a lost device."""

import time
from typing import Any

import numpy as np
import pytest

from accel.packets import work
from contract.errors import DeviceLost, OutOfMemory, TierError
from reference.cpu.tier import CpuTier
from tests.doubling import WIDTH, Doubling, inputs_of, run_doubling
from tests.tiers.chained import LARGEST, Lowered, same, step_block
from tests.vulkan.conftest import Library


@pytest.mark.parametrize("shared", [True, False])
def test_a_step_is_one_submission(faulty, open_vulkan, shared):
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


@pytest.mark.parametrize("most", [1, 1 << 60])
def test_long_steps_are_cut(faulty, open_vulkan, monkeypatch, most):
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


@pytest.mark.parametrize("function", ["vkQueueSubmit", "vkWaitSemaphores"])
def test_a_lost_device_stays_lost(faulty, open_vulkan, function):
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
    lowered.assert_lost()
    run_doubling(open_vulkan())


@pytest.mark.parametrize("shared", [True, False])
def test_a_step_that_does_not_end_in_time_loses_the_device(faulty, open_vulkan, shared):
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
    lowered.assert_lost()


def test_pipelines_the_driver_cannot_make(faulty, open_vulkan):
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


def test_snapshots_that_are_shared_are_noticed(open_vulkan, monkeypatch):
    """Negative control: one snapshot for all steps, which the host overwrites while they wait."""
    late, exact = Lowered(open_vulkan()), Lowered(CpuTier())
    late.outputs(step_block(1, seed=99))
    submissions = late.tier._submissions
    (slots,) = submissions._free.values()
    monkeypatch.setattr(submissions, "_free_slots", lambda batch: slots[-1:])
    blocks = [step_block(LARGEST.tokens, seed) for seed in range(8)]
    fences = [late.submit(block, "product", "folded") for block in blocks]
    expected = [exact.outputs(block) for block in blocks]
    late.tier.wait(fences[-1])
    assert not all(same(f.outputs, e) for f, e in zip(fences, expected, strict=True) if f.done)
