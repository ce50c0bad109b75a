"""Tiers on a simulated GPU."""

from collections.abc import Callable, Iterator

import pytest

from accel.amd.runtime import Choices
from accel.amd.sim.fake_kernel import FakeKernel
from accel.amd.sim.fake_machine import Behaviour
from accel.amd.tier import AmdTier

OpenTier = Callable[..., AmdTier]
DRIVERS = {"amdkfd": "t1", "user queues": "t2"}
"""Tiers by what they ask of the kernel; a test that names a tier itself would want its GPU."""


@pytest.fixture
def kernel() -> FakeKernel:
    """The simulated system, whose queues check what launches read."""
    return FakeKernel(Behaviour(checked=True))


@pytest.fixture
def open_amd() -> Iterator[OpenTier]:
    """``open_amd(kernel, tier, **choices)`` opens a tier that is closed after the test, and then
    nothing is left in the simulated system."""
    opened: list[tuple[AmdTier, FakeKernel]] = []

    def open_it(kernel: FakeKernel | None = None, tier: str = "t1", **choices: object) -> AmdTier:
        system = kernel or FakeKernel()
        chosen = Choices(**choices)  # type: ignore[arg-type]
        opened.append((AmdTier(choices=chosen, kernel=system, tier=tier), system))
        return opened[-1][0]

    yield open_it
    for tier, system in opened:
        tier.close()
        assert system.leaked == []


@pytest.fixture(params=DRIVERS)
def name(request) -> str:
    """One of the tiers."""
    return DRIVERS[request.param]


@pytest.fixture
def tier(open_amd, kernel, name) -> AmdTier:
    """A tier as a user gets it, reads checked."""
    return open_amd(kernel, name)
