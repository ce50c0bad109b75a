"""Tiers on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from accel.amd.fake_kernel import Behaviour, FakeKernel
from accel.amd.runtime import Choices
from accel.amd.tier import AmdTier

OpenTier = Callable[..., AmdTier]


@pytest.fixture
def kernel() -> FakeKernel:
    """The simulated system, whose queues check what launches read."""
    return FakeKernel(Behaviour(checked=True))


@pytest.fixture
def open_amd() -> Iterator[OpenTier]:
    """``open_amd(kernel, **choices)`` opens a tier that is closed after the test, and then nothing
    is left in the simulated system."""
    opened: list[tuple[AmdTier, FakeKernel]] = []

    def open_it(kernel: FakeKernel | None = None, **choices: object) -> AmdTier:
        system = kernel or FakeKernel()
        tier = AmdTier(choices=Choices(**choices), kernel=system)  # type: ignore[arg-type]
        opened.append((tier, system))
        return tier

    yield open_it
    for tier, system in opened:
        tier.close()
        assert system.left_over == []


@pytest.fixture
def tier(open_amd: OpenTier, kernel: FakeKernel) -> AmdTier:
    """A tier as a user gets it, reads checked."""
    return open_amd(kernel)
