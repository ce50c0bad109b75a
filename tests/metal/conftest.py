"""Tiers on a simulated Mac, with nothing wrong and nothing left when they are closed."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from accel.metal.runtime import Choices
from accel.metal.sim.fake_machine import Behaviour
from accel.metal.sim.fake_metal import FakeMetal
from accel.metal.tier import MetalTier
from tests.needs import need_device, need_installed

OpenTier = Callable[..., MetalTier]
MakeMac = Callable[..., FakeMetal]


def new_mac(cache: Path, **behaviour: Any) -> FakeMetal:
    """A simulated Mac; skips where there is no g++."""
    need_installed("cffi", "metal")
    return need_device(lambda: FakeMetal(Behaviour(**behaviour), cache))


@pytest.fixture
def make_mac(kernel_cache) -> MakeMac:
    """``make_mac(**behaviour)`` is one that a test judges itself."""
    return lambda **behaviour: new_mac(kernel_cache, **behaviour)


@pytest.fixture
def mac(make_mac) -> Iterator[FakeMetal]:
    """A Mac on which nothing goes wrong and everything is given back."""
    made = make_mac()
    yield made
    assert (made.problems, made.leaked, made.taken) == ([], [], 0)


@pytest.fixture
def open_metal(mac) -> Iterator[OpenTier]:
    """``open_metal(**choices)`` opens a tier that is closed after the test."""
    with ExitStack() as opened:
        yield lambda **choices: opened.enter_context(
            MetalTier(choices=Choices(**choices), metal=mac.metal)
        )


@pytest.fixture
def tier(open_metal) -> MetalTier:
    """A tier as a user gets it."""
    return open_metal()
