"""Calls of the driver, each in the context it is for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from accel.cuda.driver import Context, CudaError, Driver, Handle
from tests.cuda.fake_driver import FakeDriver


class LastHeldUntil(list[str]):
    """The names of calls; what is ``held`` is given up when ``function`` is about to run."""

    def __init__(self, function: str, held: list[Handle]) -> None:
        self.function = function
        self.held = held

    def append(self, name: str) -> None:
        super().append(name)
        if name == self.function:
            self.held.clear()


def test_a_finalizer_leaves_the_context_of_a_call_current() -> None:
    """The collector of garbage runs it anywhere, so between choosing a context and using it."""
    fake = FakeDriver()
    driver = Driver(fake)
    first, second = Context(driver, 0), Context(driver, 0)
    event = Handle(first, first.call("cuEventCreate", 0), "cuEventDestroy")
    fake.calls = LastHeldUntil("cuMemAlloc", [event])
    del event
    address = second.call("cuMemAlloc", 256)
    assert "cuEventDestroy" in fake.calls
    assert address in fake.current.memory
    second.call("cuMemFree", address)


def test_each_thread_has_its_own_context() -> None:
    """What one makes current for a while is not what a call of another thread is in."""
    fake = FakeDriver()
    driver = Driver(fake)
    first, second = Context(driver, 0), Context(driver, 0)
    with ThreadPoolExecutor(1) as other:
        other.submit(first.call, "cuStreamCreate", 0).result()
        address = driver.call("cuMemAlloc", 256)
        assert other.submit(lambda: address in fake.current.memory).result() is False
    second.call("cuMemFree", address)


def test_a_thread_has_no_context_until_it_chooses_one() -> None:
    driver = Driver(FakeDriver())
    Context(driver, 0)
    with ThreadPoolExecutor(1) as other, pytest.raises(CudaError, match="INVALID_CONTEXT"):
        other.submit(driver.call, "cuMemAlloc", 256).result()


def test_a_finalizer_of_a_closed_context_calls_nothing() -> None:
    fake = FakeDriver()
    context = Context(Driver(fake), 0)
    event = Handle(context, context.call("cuEventCreate", 0), "cuEventDestroy")
    context.close()
    fake.calls.clear()
    del event
    assert fake.calls == []
