"""The tier behind the contract on a simulated GPU: devices, the calls of a step, errors, a lost
device. What all tiers have in common is in tests/tiers."""

from collections.abc import Callable
from typing import Any

import pytest

from accel.intel.api import LevelZeroError, load_level_zero
from accel.intel.tier import device_lines
from accel.kernels.source import Traits
from contract.errors import DeviceLost, OutOfMemory, TierError, TierUnavailable
from tests.doubling import STATE, Doubling, inputs_of, run_doubling, values_of
from tests.intel.conftest import OpenTier
from tests.intel.simulated import Simulated

STEP = (
    *("zeCommandListReset", "zeCommandListAppendBarrier", "zeCommandListAppendMemoryCopy"),
    *("zeCommandListAppendBarrier", "zeCommandListClose", "zeEventHostReset", "zeEventHostReset"),
    *("zeCommandListAppendMemoryCopy", "zeCommandQueueExecuteCommandLists"),
)
"""All that a step calls when one output is requested."""


def test_calls_of_a_step(tier, gpu):
    """One list, whatever the step holds: its launches were recorded once."""
    lowered = Doubling(tier)
    for number in range(3):
        gpu.forget()
        fence = tier.submit(lowered.batch, inputs_of(values_of(number)), ("y",))
        called = gpu.calls
        tier.wait(fence)
    assert called == list(STEP)
    tier.free(lowered.y)


MISSING: dict[str, tuple[dict[str, int], str]] = {
    "driver": ({"drivers": 0}, "Level Zero has no driver for a GPU"),
    "queue": ({"computes": 0}, "lacks a queue that computes"),
    "version": ({"spirv_minor": 1}, "lacks SPIR-V 1.2"),
    "binary16": ({"fp16": 0}, "lacks binary16"),
    "groups": ({"group_items": 128}, "lacks work-groups of 256 items"),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_named(make_gpu, open_intel, case):
    """When a tier is opened, and by ``zinc-rt devices``."""
    behaviour, reason = MISSING[case]
    gpu = make_gpu(**behaviour)
    with pytest.raises(TierUnavailable, match=reason):
        open_intel(gpu)
    if behaviour.get("drivers") is None:
        assert reason in device_lines(gpu.zero)[0]
    assert (gpu.problems, gpu.leaked) == ([], 0)


def test_devices_are_chosen_by_number_or_name(gpu, open_intel):
    """Another one is missed, and those there are named."""
    for requested in ("", "0", "intel gpu"):
        open_intel(gpu, requested).close()
    for requested in ("1", "Arc"):
        with pytest.raises(TierUnavailable, match="no GPU matches") as caught:
            open_intel(gpu, requested)
        assert caught.value.remedy == "there is 0: Intel GPU (simulated)"


def test_integrated_gpus_are_not_taken_for_cards(make_gpu, open_intel):
    """What ``auto`` asks for is a card; a name takes any."""
    gpu = make_gpu(integrated=1)
    with pytest.raises(TierUnavailable, match="is no graphics card of its own"):
        open_intel(gpu, discrete=True)
    with open_intel(gpu) as tier:
        run_doubling(tier)
    assert (gpu.problems, gpu.leaked) == ([], 0)


def test_a_machine_without_the_loader():
    """The error says what to install."""
    with pytest.raises(TierUnavailable, match=r"no Level Zero loader .*apt install libze1"):
        load_level_zero(("libno_such_loader.so.1",))


def test_the_self_test_asks_the_device(make_gpu, open_intel):
    """A simulated GPU computes everything exactly; the line of ``zinc-rt devices`` says so."""
    gpu = make_gpu()
    with open_intel(gpu, traits=None) as tier:
        assert tier.traits == Traits()
    assert (gpu.problems, gpu.leaked) == ([], 0)


def error_of(call: Callable[..., None], *arguments: Any) -> str:
    """The text of the contract's error that a call raises, empty where it raises none."""
    try:
        call(*arguments)
    except TierError as error:
        return str(error)
    return ""


def opened_and_run(gpu: Simulated, open_intel: OpenTier) -> None:
    """Everything a tier does with a device."""
    with open_intel(gpu) as tier:
        lowered = Doubling(tier)
        try:
            fences = [tier.submit(lowered.batch, inputs_of(values_of(n)), ("y",)) for n in range(2)]
            for fence in fences:
                tier.wait(fence)
            tier.read(lowered.y, 0, 8)
        finally:
            tier.free(lowered.y)


FAILING = (
    *("zeInit", "zeDriverGet", "zeDeviceGet", "zeDeviceGetProperties", "zeContextCreate"),
    *("zeCommandQueueCreate", "zeCommandListCreateImmediate", "zeEventPoolCreate"),
    *("zeEventCreate", "zeMemAllocDevice", "zeMemAllocHost", "zeModuleCreate", "zeKernelCreate"),
    *("zeKernelSetGroupSize", "zeKernelSetArgumentValue", "zeCommandListCreate"),
    *("zeCommandListAppendLaunchKernel", "zeCommandListAppendBarrier", "zeCommandListClose"),
    *("zeCommandListAppendMemoryCopy", "zeCommandListAppendMemoryFill", "zeEventHostReset"),
    *("zeCommandQueueExecuteCommandLists", "zeCommandQueueSynchronize", "zeEventQueryStatus"),
)


@pytest.mark.parametrize("function", FAILING)
def test_every_call_fails_once(make_gpu, open_intel, function):
    """At its first and at a later call: the error is the contract's and names function and result,
    and nothing is left."""
    for number in (1, 3):
        gpu = make_gpu()
        gpu.fail(function, number, "ERROR_INSUFFICIENT_PERMISSIONS")
        said = error_of(opened_and_run, gpu, open_intel)
        expected = f"{function} gave ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS"
        assert expected in said or (number == 3 and not said)
        assert (gpu.problems, gpu.leaked) == ([], 0), number


def test_memory_that_runs_out(gpu, open_intel):
    """What the driver refuses, what is above the largest allocation, and what goes on."""
    with open_intel(gpu) as tier:
        with pytest.raises(OutOfMemory, match="state"):
            tier.alloc(STATE, 600 << 20)
        gpu.fail("zeMemAllocDevice", 1, "ERROR_OUT_OF_DEVICE_MEMORY")
        with pytest.raises(OutOfMemory, match="zeMemAllocDevice gave ZE_RESULT_ERROR_OUT_OF"):
            tier.alloc(STATE, 4 << 20)
        gpu.fail("", 0, "SUCCESS")
        run_doubling(tier)


def test_the_result_of_a_call_has_its_name(gpu):
    """And a number that nobody knows stays one."""
    gpu.fail("zeInit", 1, "ERROR_UNSUPPORTED_VERSION")
    with pytest.raises(LevelZeroError, match="zeInit gave ZE_RESULT_ERROR_UNSUPPORTED_VERSION"):
        gpu.zero.call("Init", 1)
    unknown: Any = gpu._fake
    unknown.fake_fail(b"zeInit", 1, 12345)
    with pytest.raises(LevelZeroError, match="ze_result_t 0x3039"):
        gpu.zero.call("Init", 1)


def test_an_error_of_the_driver_loses_the_device(make_gpu, open_intel):
    """It stays lost, and what it may still use is not freed."""
    gpu = make_gpu()
    tier = open_intel(gpu)
    lowered = Doubling(tier)
    lowered.run()
    gpu.behaviour.lost = 1
    with pytest.raises(DeviceLost, match="ZE_RESULT_ERROR_DEVICE_LOST"):
        tier.wait(tier.submit(lowered.batch, inputs_of(values_of(0)), ("y",)))
    with pytest.raises(DeviceLost):
        tier.read(lowered.y, 0, 4)
    tier.close()
    assert gpu.problems == []
    assert gpu.leaked > 0


def test_large_data_goes_through_staging(tier):
    """In parts, to any offset and back."""
    tier._memory._staging_bytes = 4096
    state = tier.alloc(STATE, 10_000)
    data = values_of(0).view("u1").reshape(-1).repeat(18)[:8_000]
    tier.write(state, 1000, data)
    assert (tier.read(state, 1000, 8_000) == data).all()
    assert not tier.read(state, 0, 1000).any()
    tier.free(state)
