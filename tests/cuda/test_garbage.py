"""No garbage is collected while a step is captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from accel.cuda.driver import CudaError
from contract.garbage import garbage_collection_off
from tests.cuda.conftest import OpenTier
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.test_tier import Lowered


class Garbage:
    """What refers to itself, so that the collector ends it."""

    def __init__(self) -> None:
        self.itself = self


class Collecting(list[str]):
    """The names of calls; the collector of garbage, where it may run, does so at each launch."""

    def append(self, name: str) -> None:
        super().append(name)
        if name.startswith("cuLaunchKernel") and gc.isenabled():
            gc.collect()


@pytest.fixture
def only_asked() -> Iterator[None]:
    """The collector runs where the test calls it, and not because objects were allocated."""
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("only_asked")
def test_nothing_is_collected_while_a_step_is_captured(
    driver: FakeDriver, open_cuda: OpenTier
) -> None:
    """A finalizer of garbage, of another tier too, may wait for the device: a capture of its thread
    is lost by that."""
    memory = open_cuda()._memory
    held = memory.adopt("held", np.zeros(4, np.uint8))
    tier = open_cuda()
    memory.context.when_gone(Garbage(), memory.free, held)
    driver.calls = Collecting()
    Lowered(tier).run()
    assert "cuMemFree" not in driver.calls[: driver.calls.index("cuGraphLaunch")]
    assert gc.isenabled()
    gc.collect()
    assert "cuMemFree" in driver.calls


def broken_capture(seen: list[bool]) -> None:
    """Fails in a pause that began before another one ended."""
    with garbage_collection_off():
        with garbage_collection_off():
            seen.append(gc.isenabled())
        seen.append(gc.isenabled())
        raise CudaError("cuLaunchKernel", "CUDA_ERROR_UNKNOWN")


def test_it_is_collected_again_behind_the_last_of_several_pauses() -> None:
    seen: list[bool] = []
    with pytest.raises(CudaError):
        broken_capture(seen)
    assert seen == [False, False]
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with garbage_collection_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
