"""What is missing is said in one line, with what to install."""

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from accel.opencl import api, binding, driver
from accel.opencl import device as device_module
from accel.opencl.device import find_device, find_devices
from accel.opencl.driver import load_drivers
from contract.errors import TierUnavailable
from tests.patience import PATIENCE_SECONDS


def test_drivers_are_loaded_in_a_thread(device):
    """It ends, and the devices are the same afterwards."""
    thread = load_drivers()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert find_device().name == device.name


def test_devices_are_looked_for_when_drivers_are_loaded(device, monkeypatch):
    """Not while a thread loads them: it may be the only one that sees the devices."""
    loaded = threading.Event()
    order: list[str] = []

    def load() -> None:
        assert loaded.wait(PATIENCE_SECONDS)
        order.append("loaded")

    def platforms():
        order.append("asked")
        return []

    def find() -> None:
        with suppress(TierUnavailable):
            find_devices()

    monkeypatch.setattr(driver, "_load", load)
    monkeypatch.setattr(binding, "get_platforms", platforms)
    load_drivers()
    finding = threading.Thread(target=find)
    finding.start()
    finding.join(0.2)
    loaded.set()
    finding.join(PATIENCE_SECONDS)
    assert order == ["loaded", "asked"]


def test_no_driver_to_load_is_no_error(monkeypatch):
    """Whoever opens a device says what is missing."""
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(driver, "library_path", lambda: "libNoSuchLibrary.so.9")
    load_drivers().join(PATIENCE_SECONDS)
    assert failed == []


def test_a_missing_library_names_the_extra(monkeypatch):
    """Neither the system nor a package has one: the error says which extra brings it."""
    monkeypatch.setattr(api, "LIBRARY", "libNoSuchLibrary.so.9")
    monkeypatch.setattr(api, "CARRIER", "no_such_package")
    monkeypatch.setattr(device_module, "opencl", lambda: api.OpenCl(api.library_path()))
    with pytest.raises(TierUnavailable, match=r"pip install '(zinc-rt|\.)\[opencl\]'"):
        find_devices()


@pytest.fixture
def unasked() -> Iterator[None]:
    driver.check_threads.cache_clear()
    yield
    driver.check_threads.cache_clear()


def test_a_driver_whose_threads_are_refused_is_not_loaded(monkeypatch, unasked):
    """PoCL would end the process. They are asked for again, since a refusal may pass."""
    said = r"refuses the threads .*; raise .*pids\.max\), or set POCL_MAX_PTHREAD_COUNT to fewer"
    before = threading.stack_size(1 << 50)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(driver, "library_path", lambda: pytest.fail("loaded"))
            driver._load()
        with pytest.raises(TierUnavailable, match=said):
            find_devices()
    finally:
        threading.stack_size(before)
    find_devices()


@pytest.mark.parametrize(("most", "started"), [("3", 3), ("0", 1), ("x", 7), (None, 7)])
@pytest.mark.parametrize("refused", [False, True])
def test_as_many_threads_are_asked_for_as_the_driver_starts(
    most, started, refused, monkeypatch, unasked
):
    """None of them stays, so that the driver finds as much room."""
    monkeypatch.setattr(driver.os, "cpu_count", lambda: 7)
    monkeypatch.delenv(driver.MOST_THREADS, raising=False)
    if most is not None:
        monkeypatch.setenv(driver.MOST_THREADS, most)
    start, asked = threading.Thread.start, list[threading.Thread]()

    def count(thread: threading.Thread) -> None:
        asked.append(thread)
        if refused and len(asked) == started:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", count)
        with pytest.raises(TierUnavailable) if refused else nullcontext():
            driver.check_threads()
    assert len(asked) == started
    gone = [one for one in asked if one.native_id is not None]
    assert not any(one.is_alive() for one in gone)
    assert not any(os.path.exists(f"/proc/self/task/{one.native_id}") for one in gone)


@pytest.mark.parametrize("platforms", ["raises", "none", "empty"])
def test_no_platform_or_device_names_the_package(platforms, monkeypatch):
    """No ICD, no platform and a platform without devices all say what to install."""

    class LogicError(Exception):
        pass

    def get_platforms() -> list[SimpleNamespace]:
        if platforms == "raises":
            raise LogicError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR\nmore")
        empty = SimpleNamespace(get_devices=list)
        return [empty] if platforms == "empty" else []

    stand_in = SimpleNamespace(get_platforms=get_platforms, Error=LogicError)
    monkeypatch.setattr(device_module, "import_binding", lambda: stand_in)
    with pytest.raises(TierUnavailable, match="apt install pocl-opencl-icd") as caught:
        find_devices()
    assert "\n" not in str(caught.value)


def test_a_device_is_found_by_any_part_of_its_name(device):
    """Names and platforms match without regard to case."""
    assert find_device(device.name[3:9].upper()) == device


def test_an_unknown_device_lists_those_there_are(device):
    """A misspelt name is answered with the names to choose from."""
    with pytest.raises(TierUnavailable) as caught:
        find_device("no such device")
    assert device.name in str(caught.value)
