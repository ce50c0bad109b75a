"""Steps on simulated GPUs whose timing a test decides: recordings, memory, a device that hangs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel.intel.runtime import Choices as IntelChoices
from accel.intel.tier import IntelTier
from accel.kernels.source import Traits
from accel.metal.tier import MetalTier
from accel.packets import work
from contract.errors import DeviceLost
from tests.doubling import STATE, Doubling, inputs_of, run_doubling, values_of
from tests.intel.simulated import new_gpu
from tests.metal.conftest import new_mac

INTEL, METAL = "intel-simulated", "metal-simulated"
NEVER = 1 << 30
"""So many times a simulated device is looked at before it begins a step."""


class Machine:
    """A simulated machine with one GPU; ``open`` opens a tier on it."""

    def __init__(self, name: str, cache: Path) -> None:
        if name == METAL:
            mac = new_mac(cache)
            self.made: Any = mac
            self.open: Callable[[], Any] = lambda: MetalTier(metal=mac.metal)
        else:
            gpu = new_gpu(cache)
            choices = IntelChoices(traits=Traits(), cache=cache / "intel")
            self.made, self.open = gpu, lambda: IntelTier(choices=choices, zero=gpu.zero)

    @property
    def clean(self) -> bool:
        """Whether everything was called rightly and given back."""
        return not self.made.problems and not self.made.leaked


@pytest.fixture(params=[INTEL, METAL])
def machine(request, kernel_cache) -> Machine:
    return Machine(request.param, kernel_cache)


def test_steps_in_flight_have_recordings_of_their_own(machine):
    """The device begins none of eight steps before the last is submitted; slots are reused."""
    with machine.open() as tier:
        machine.made.behaviour.looks = NEVER
        lowered = Doubling(tier)
        steps = []
        for number in range(8):
            values = values_of(number)
            inputs = inputs_of(values)
            steps.append((values, tier.submit(lowered.batch, inputs, ("y",))))
            inputs[:] = 0xFF
        assert not steps[0][1].done
        for values, fence in reversed(steps):
            tier.wait(fence)
            lowered.check(fence.outputs["y"], values)
        machine.made.behaviour.looks = 0
        lowered.run(9)
        assert len(lowered.batch.launch.made) == 8
        tier.free(lowered.y)
    assert machine.clean


def test_a_long_step_is_cut(machine, monkeypatch):
    """So that no watchdog ends it: each op is a command of its own."""
    monkeypatch.setattr(work, "BATCH_WORK", 1)
    with machine.open() as tier:
        lowered = Doubling(tier)
        lowered.run(2)
        assert len(lowered.batch.launch.made[0].runs) == 2
        tier.free(lowered.y)
    assert machine.clean


def test_scratch_that_moves_is_followed(machine):
    """Batches recorded before use the new memory."""
    with machine.open() as tier:
        lowered = Doubling(tier)
        lowered.run()
        before = tier._scratch
        tier._reserve(1 << 20, 0, 0)
        assert tier._scratch is not before
        if before.host is not None:
            before.host[:] = 7
        lowered.run(2)
        assert before.host is None or (before.host == 7).all()
        tier.free(lowered.y)
    assert machine.clean


def test_memory_that_a_step_may_use_is_released_after_it(machine):
    """Steps may use all memory: an arena is given back when those in flight have ended."""
    with machine.open() as tier:
        machine.made.behaviour.looks = NEVER
        lowered = Doubling(tier)
        large = tier.alloc(STATE, 32 << 20)
        held = tier.allocated_bytes
        fence = tier.submit(lowered.batch, inputs_of(values_of(0)))
        tier.free(large)
        assert fence.done
        assert tier.allocated_bytes == held - (32 << 20)
        tier.free(lowered.y)
    assert machine.clean


@pytest.mark.parametrize(
    ("machine", "ends"),
    [
        pytest.param(METAL, True, id="metal-ends-late"),
        pytest.param(METAL, False, id="metal-hangs"),
        pytest.param(INTEL, False, id="intel-hangs"),
    ],
    indirect=["machine"],
)
def test_a_device_that_hangs_is_lost(machine, monkeypatch, ends):
    """Every use says so. What the device may still use is given back only if the step ends before
    the tier is closed; then another tier opens."""
    tier = machine.open()
    monkeypatch.setattr(f"{type(tier).__module__}.GRACE_SECONDS", 0.05)
    lowered = Doubling(tier)
    lowered.run(2)
    machine.made.behaviour.hangs = 1
    fence = tier.submit(lowered.batch, inputs_of(values_of(0)))
    with pytest.raises(DeviceLost, match=r"did not end within 0.05 s"):
        tier.wait(fence, 0.05)
    machine.made.behaviour.hangs = 0 if ends else 1
    lowered.assert_lost()
    assert not machine.made.problems
    assert bool(machine.made.leaked) != ends
    if ends:
        with machine.open() as other:
            run_doubling(other)
        assert machine.clean
