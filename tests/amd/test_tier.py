"""What goes wrong while a tier runs, and what keeps steps apart."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from accel.amd import launcher, pm4
from accel.amd.program import checked
from accel.amd.self_check import ProbeCase, divides
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.sim.fake_machine import Behaviour
from accel.amd.tier import AmdTier
from accel.amd.topology import PAGE
from accel.kernels.device_probe import Found, samples
from contract.errors import CodecError, DeviceLost, OutOfMemory, TierUnavailable
from contract.kernel import GpuTarget
from contract.opcodes import Opcode
from harness.parity import all_cases, compare, run_barrier
from tests.amd.code import shipped
from tests.amd.conftest import OpenTier
from tests.patience import PATIENCE_SECONDS

DEPENDENT = next(case for case in all_cases(1) if case.opcode is Opcode.RMS_NORM_FUSED_MLP_GATE_UP)
"""An opcode whose launches read what those before them wrote."""


def test_two_launches_that_depend(tier: AmdTier) -> None:
    """On a GPU that checks what a launch may see."""
    assert compare(tier, DEPENDENT) == {}


def test_a_step_without_launches(tier: AmdTier) -> None:
    """Its fence comes."""
    run_barrier(tier)


@pytest.mark.parametrize("left_out", ["wait_for_launches", "acquire_memory"])
def test_a_flush_or_an_acquire_that_is_missing_is_noticed(
    open_amd: OpenTier, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    """Negative control: the packet is left out between the launches of a step."""
    tier = open_amd(FakeKernel(Behaviour(checked=True)), native=True)
    monkeypatch.setattr(launcher.pm4, left_out, lambda *_: [])
    with pytest.raises(DeviceLost, match=r"launch \d+ .*reads what launch"):
        compare(tier, DEPENDENT)


def test_a_cut_buffer_is_noticed(open_amd: OpenTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the last word of a step is not sent."""
    tier = open_amd()
    whole = pm4.indirect_buffer
    monkeypatch.setattr(pm4, "indirect_buffer", lambda at, n, flags: whole(at, n - 1, flags))
    with pytest.raises(DeviceLost, match=r"past the end of its buffer|in the midst of a packet"):
        compare(tier, DEPENDENT)


def test_a_queue_that_hangs_is_given_up(
    open_amd: OpenTier, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step waits for memory that nobody writes; the tier is lost from then on, and its queue
    is taken from it."""
    kernel = FakeKernel()
    tier = open_amd(kernel, name)
    fence = tier._runtime.queue.fence_address + 128
    whole = pm4.indirect_buffer

    def hanging(address: int, words: int, flags: int) -> pm4.Words:
        return [*pm4.wait_memory(fence, 1), *whole(address, words, flags)]

    monkeypatch.setattr(pm4, "indirect_buffer", hanging)
    monkeypatch.setattr("accel.amd.queue.GRACE_SECONDS", 0.05)
    wait = AmdTier.wait
    monkeypatch.setattr(AmdTier, "wait", lambda self, fence, timeout=None: wait(self, fence, 0.05))
    with pytest.raises(DeviceLost, match=r"did not end within 0\.05 s"):
        compare(tier, DEPENDENT)
    assert kernel.machine.gpu.queues == {}
    with pytest.raises(DeviceLost, match="did not end"):
        compare(tier, DEPENDENT)


def test_out_of_memory_names_the_buffer(open_amd: OpenTier) -> None:
    """And the tier goes on."""
    tier = open_amd()
    device = tier._device
    capacity, device.capacity = device.capacity, device.held + PAGE
    with pytest.raises(OutOfMemory, match="out of memory for"):
        compare(tier, DEPENDENT)
    device.capacity = capacity
    assert compare(tier, DEPENDENT) == {}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"target": GpuTarget.GFX1100}, "target GFX1100, not GFX1201"),
        ({"subgroup_size": 64}, "waves of 64, not 32"),
        ({"scratch_bytes": 16}, "16 bytes of scratch"),
    ],
)
def test_a_kernel_that_cannot_be_launched_is_refused(change: dict[str, Any], problem: str) -> None:
    """A kernel of another GPU, of wide waves and with scratch memory; the shipped one is taken."""
    kernel = shipped("rope")
    assert checked(kernel, GpuTarget.GFX1201) is kernel
    with pytest.raises(CodecError, match=problem):
        checked(replace(kernel, **change), GpuTarget.GFX1201)


def test_a_fault_says_where(open_amd: OpenTier, name: str) -> None:
    """A buffer that is gone while packets still read it: the address, the launch, nothing kept."""
    kernel = FakeKernel()
    tier = open_amd(kernel, name)
    place = tier._device.allocate("gone", PAGE)
    at = place.address
    tier._device.free(place)
    queue = tier._runtime.queue
    with pytest.raises(DeviceLost, match=f"a fault at {at:#x} .*INDIRECT_BUFFER"):
        queue.wait(queue.submit(queue.indirect_buffer(at, 1)), PATIENCE_SECONDS)
    tier.close()
    assert kernel.left_over == []


def test_a_damaged_installation_is_said_to_be_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr("accel.amd.program.folder_of", lambda gpu: tmp_path)
    kernel = FakeKernel()
    with pytest.raises(TierUnavailable, match="install zinc-rt again"):
        AmdTier(kernel=kernel)
    assert kernel.left_over == []


class Answering(ProbeCase):
    """A GPU that gets ``wrong`` wrong by itself, and in integers as well if ``always``."""

    wrong = ""
    always = False

    def answer(self, native: bool) -> Found:
        found = {key: value.copy() for key, value in samples().expected.items()}
        if native or self.always:
            found[self.wrong].view(np.int32)[0] ^= 1
        return found


@pytest.mark.parametrize("wrong", ["divide", "root"])
def test_what_the_gpu_gets_wrong_integers_do(tier: AmdTier, wrong: str) -> None:
    runtime = tier._runtime
    asked = Answering(runtime.device, runtime.queue, runtime.modules)
    Answering.wrong, Answering.always = wrong, False
    assert not divides(asked)
    Answering.always = True
    with pytest.raises(TierUnavailable, match=f"does not compute exactly: {wrong}"):
        divides(asked)


def test_what_has_no_remedy_refuses_the_gpu(tier: AmdTier) -> None:
    runtime = tier._runtime
    Answering.wrong, Answering.always = "contraction", False
    with pytest.raises(TierUnavailable, match="does not compute exactly: contraction"):
        divides(Answering(runtime.device, runtime.queue, runtime.modules))


def test_an_error_of_the_system_is_the_contracts(open_amd: OpenTier) -> None:
    kernel = FakeKernel()
    tier = open_amd(kernel)
    kernel.behaviour.errors["MAP_MEMORY_TO_GPU"] = errno.EINVAL
    with pytest.raises(Exception, match="MAP_MEMORY_TO_GPU") as caught:
        compare(tier, DEPENDENT)
    assert type(caught.value).__module__ == "contract.errors"
    kernel.behaviour.errors.clear()
