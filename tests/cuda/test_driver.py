"""Calls of the driver, each in the context it is for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest

from accel.cuda.driver import NOT_READY, QUICK, Context, CudaError, Driver, Handle
from tests.cuda.fake_driver import CUresult, FakeDriver


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


def test_quick_calls_go_to_the_library_with_numbers_for_handles() -> None:
    called: list[tuple[object, ...]] = []

    def declared(symbol: str) -> Callable[..., int]:
        success, not_ready = CUresult.CUDA_SUCCESS, CUresult.CUDA_ERROR_NOT_READY
        status = int(not_ready if symbol == "cuEventQuery" else success)
        return partial(lambda *arguments: called.append(arguments) or status, symbol)

    library = SimpleNamespace(**{symbol: declared(symbol) for symbol, _ in QUICK.values()})
    driver = Driver(FakeDriver(), library)  # type: ignore[arg-type]
    driver.quick("cuEventRecord", 5, 7)
    driver.quick("cuMemcpyHtoDAsync", 1 << 40, 2, 3, 4)
    assert called == [("cuEventRecord", 5, 7), ("cuMemcpyHtoDAsync_v2", 1 << 40, 2, 3, 4)]
    with pytest.raises(CudaError, match="cuEventQuery") as failed:
        driver.quick("cuEventQuery", 5)
    assert failed.value.name == NOT_READY
