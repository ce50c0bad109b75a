"""What is missing is said in one line, with what to install."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from accel.opencl import device as device_module
from accel.opencl.device import Device, find_device, find_devices
from contract.errors import TierUnavailable


def test_missing_pyopencl_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library the error says which extra of this package brings it."""
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(TierUnavailable, match=r"pip install 'zinc-rt\[opencl\]'"):
        find_devices()


@pytest.mark.parametrize("platforms", ["raises", "none", "empty"])
def test_no_platform_or_device_names_the_package(
    platforms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No ICD, no platform and a platform without devices all say what to install."""

    class LogicError(Exception):
        pass

    def get_platforms() -> list[SimpleNamespace]:
        if platforms == "raises":
            raise LogicError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR\nmore")
        empty = SimpleNamespace(get_devices=list)
        return [empty] if platforms == "empty" else []

    stand_in = SimpleNamespace(get_platforms=get_platforms, Error=LogicError)
    monkeypatch.setattr(device_module, "import_pyopencl", lambda: stand_in)
    with pytest.raises(TierUnavailable, match="apt install pocl-opencl-icd") as caught:
        find_devices()
    assert "\n" not in str(caught.value)


def test_a_device_is_found_by_any_part_of_its_name(device: Device) -> None:
    """Names and platforms match without regard to case."""
    assert find_device(device.name[3:9].upper()) == device


def test_an_unknown_device_lists_those_there_are(device: Device) -> None:
    """A misspelt name is answered with the names to choose from."""
    with pytest.raises(TierUnavailable) as caught:
        find_device("no such device")
    assert device.name in str(caught.value)
