"""Tiers on a simulated GPU, with nothing wrong and nothing left when they are closed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from accel.intel import tier as tier_module
from accel.intel.runtime import Choices
from accel.intel.tier import IntelTier
from accel.kernels.source import Traits
from tests.intel.simulated import Simulated, new_gpu

OpenTier = Callable[..., IntelTier]
MakeGpu = Callable[..., Simulated]
NATIVE = Traits()
"""What the self-test of a simulated GPU finds, for tests that need not run it."""


@pytest.fixture
def make_gpu(kernel_cache) -> MakeGpu:
    """``make_gpu(**behaviour)`` is a machine that a test judges itself."""
    return partial(new_gpu, kernel_cache)


@pytest.fixture
def gpu(make_gpu) -> Iterator[Simulated]:
    """A machine on which nothing goes wrong and everything is given back."""
    made = make_gpu()
    yield made
    assert (made.problems, made.leaked) == ([], 0)


@pytest.fixture
def open_intel(kernel_cache) -> OpenTier:
    """``open_intel(gpu, **choices)`` opens a tier that the test closes."""

    def opened(gpu: Simulated, device: str = "", **choices: Any) -> IntelTier:
        chosen = {"traits": NATIVE, "cache": kernel_cache / "intel", **choices}
        return IntelTier(device, Choices(**chosen), gpu.zero)

    return opened


@pytest.fixture
def tier(gpu, open_intel) -> Iterator[IntelTier]:
    """A tier as a user gets it."""
    with ExitStack() as undo:
        yield undo.enter_context(open_intel(gpu))


@pytest.fixture
def present(gpu, monkeypatch) -> Simulated:
    """A machine on which every command finds the simulated GPU."""
    monkeypatch.setattr(tier_module, "load_level_zero", lambda: gpu.zero)
    return gpu
