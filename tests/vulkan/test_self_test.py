"""What a device is asked before it is trusted, and what wrong answers lead to."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from accel.kernels.device_probe import (
    ALL_NATIVE,
    SELF_TEST,
    TINY,
    Found,
    results_of,
    samples,
    traits_of,
)
from accel.kernels.source import Traits
from accel.vulkan.launcher import launch_packet
from contract.errors import TierUnavailable

REMEDIES = {"divide": "divide", "root": "root", "half": "half", "signed": "dot", "mixed": "dot"}


def spoiled(name: str, traits: Traits) -> Found:
    """What a device answers that gets ``name`` wrong by itself, in one sample."""
    found = {key: value.copy() for key, value in samples().expected.items()}
    if name not in REMEDIES or getattr(traits, REMEDIES[name]):
        found[name].view(np.int32)[0] ^= 1
    return found


@pytest.mark.parametrize("name", REMEDIES)
def test_what_the_device_gets_wrong_integers_do(name):
    """One bit of one sample is enough; everything else stays with the device."""
    traits = traits_of(lambda asked: spoiled(name, asked), "vulkan", "device", True)
    assert traits == replace(ALL_NATIVE, **{REMEDIES[name]: False})


@pytest.mark.parametrize("name", ["contraction", "difference", "regrouping", "narrowing"])
def test_what_has_no_remedy_refuses_the_device(name):
    with pytest.raises(TierUnavailable, match=f"does not compute exactly: {name}"):
        traits_of(lambda asked: spoiled(name, asked), "vulkan", "device", True)


def test_remedies_that_fail_refuse_the_device():
    """Wrong with the device's own division, and wrong in integers."""

    def wrong(asked: Traits) -> Found:
        return spoiled("divide", replace(asked, divide=True))

    with pytest.raises(TierUnavailable, match="does not compute exactly: divide"):
        traits_of(wrong, "vulkan", "device", True)


def test_a_division_that_flushes_is_done_in_integers():
    """Subnormal results alone are enough; a flushed product is no reason to refuse the device."""

    def flushing(asked: Traits) -> Found:
        found = {name: value.copy() for name, value in samples().expected.items()}
        found["contraction"][-TINY:] = 0
        if asked.divide:
            found["divide"][-TINY:] = 0
        return found

    assert traits_of(flushing, "vulkan", "device", True) == replace(ALL_NATIVE, divide=False)


def test_a_right_device_does_everything_itself():
    for has_dot in (True, False):
        asked = traits_of(lambda traits: samples().expected, "vulkan", "device", has_dot)
        assert asked == replace(ALL_NATIVE, dot=has_dot)


def test_here_integers_and_the_device_agree(open_vulkan):
    """The real answers: found by asking, and equal with every remedy in place."""
    tier = open_vulkan()
    assert tier.traits.dot == tier.device.integer_dot
    runtime = tier._runtime
    none = Traits(divide=False, root=False, half=False, dot=False)
    for traits in (none, tier.traits):
        memory, program = runtime.memory, runtime.program
        found = results_of(
            memory, partial(launch_packet, memory, program, SELF_TEST, traits=traits)
        )
        for name, expected in samples().expected.items():
            assert np.array_equal(found[name], expected, equal_nan=expected.dtype.kind == "f")
