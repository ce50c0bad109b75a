"""OpenCL tiers for the tests, one kernel cache for all of them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from accel.opencl import contents
from accel.opencl.device import Device, find_device
from accel.opencl.launcher import Mode
from accel.opencl.runtime import Choices
from accel.opencl.tier import OpenClTier
from tests.needs import need_device
from tests.opencl_parts import SOME, is_usual

OpenTier = Callable[..., OpenClTier]

WAYS = {
    "persistent": Choices(mode=Mode.PERSISTENT),
    "one-worker": Choices(mode=Mode.PERSISTENT, threads=1),
    "launch": Choices(mode=Mode.LAUNCH),
    "banked": Choices(shared_addresses=False),
    "banked-launch": Choices(mode=Mode.LAUNCH, shared_addresses=False),
    "integer-remedies": Choices(native_arithmetic=False),
}
"""Every way the tier can run on a CPU device."""
EACH_WAY = [
    pytest.param(way, marks=[pytest.mark.soak] if way == "banked-launch" else []) for way in WAYS
]
"""Launches and banks in the gate apart; both at once has what runs by work-groups, see
tests/kernels/test_model.py."""


@pytest.fixture(scope="session")
def device() -> Device:
    """The first OpenCL device."""
    return need_device(find_device)


@pytest.fixture
def open_opencl(device, kernel_cache, monkeypatch) -> Iterator[OpenTier]:
    """``open_opencl(**choices)`` opens a tier that is closed after the test. What its programs hold
    depends on ``choices`` alone, and all tests share them."""
    always = contents.ALWAYS
    with ExitStack() as opened:

        def open_it(**choices: object) -> OpenClTier:
            chosen = replace(Choices(cache=kernel_cache), **choices)
            monkeypatch.setattr(contents, "ALWAYS", always if is_usual(chosen) else SOME)
            return opened.enter_context(OpenClTier(choices=chosen))

        yield open_it


@pytest.fixture
def tier(open_opencl) -> OpenClTier:
    """A tier as a user gets it."""
    return open_opencl()
