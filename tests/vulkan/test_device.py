"""What is missing on a machine, and what to do about it."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from accel.kernels.device_probe import ALL_NATIVE, kernels_of
from accel.vulkan.api import Vulkan, load_vulkan
from accel.vulkan.device import FEATURES_12, Device, Instance, Kind
from accel.vulkan.tier import VulkanTier, device_lines
from contract.errors import TierUnavailable
from tests.vulkan.conftest import Library

VERSION_1_1 = 1 << 22 | 1 << 12


def instead(vulkan: Vulkan, **functions: Callable[..., Any]) -> Vulkan:
    """The library with some functions replaced; each gets the real one first."""
    return Vulkan(vulkan.ffi, Library(vulkan.library, functions))


def refused(library: Vulkan, device: str = "") -> TierUnavailable:
    with pytest.raises(TierUnavailable) as caught:
        VulkanTier(device, vulkan=library)
    return caught.value


def test_without_cffi_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "accel.vulkan.bindings", raising=False)
    monkeypatch.setitem(sys.modules, "_cffi_backend", None)
    with pytest.raises(TierUnavailable, match=r"pip install '(zinc-rt|\.)\[vulkan\]'"):
        load_vulkan()


def test_without_a_loader_what_to_install_is_said():
    with pytest.raises(TierUnavailable, match=r"no Vulkan loader.*apt install libvulkan1"):
        load_vulkan(("libvulkan-of-nobody.so",))


def test_without_a_driver_what_to_install_is_said(vulkan):
    """The loader alone: it makes no instance, or one without devices."""
    incompatible = vulkan.constant("ERROR_INCOMPATIBLE_DRIVER")
    error = refused(instead(vulkan, vkCreateInstance=lambda real, *a: incompatible))
    assert "VK_ERROR_INCOMPATIBLE_DRIVER" in error.reason
    assert "driver" in error.remedy

    def none(real: Any, instance: Any, count: Any, handles: Any) -> int:
        count[0] = 0
        return 0

    error = refused(instead(vulkan, vkEnumeratePhysicalDevices=none))
    assert "no device" in error.reason


def test_a_name_nobody_has_lists_those_there_are(vulkan):
    with Instance(vulkan) as instance:
        names = [device.name for device in instance.devices()]
    error = refused(vulkan, "Voodoo 2")
    assert "'Voodoo 2'" in error.reason
    assert all(name in error.remedy for name in names)


def test_an_old_device_says_its_version(vulkan):
    def old(real: Any, device: Any, properties: Any) -> None:
        real(device, properties)
        properties.properties.apiVersion = VERSION_1_1

    error = refused(instead(vulkan, vkGetPhysicalDeviceProperties2=old))
    assert "Vulkan 1.2 (it has 1.1)" in error.reason


@pytest.mark.parametrize("feature", FEATURES_12)
def test_a_missing_feature_is_named(vulkan, feature):
    """In whichever order the structures of features are linked."""
    kind = "VkPhysicalDeviceVulkan12Features"

    def without(real: Any, device: Any, chain: Any) -> None:
        real(device, chain)
        asked = chain
        while asked.pNext != vulkan.ffi.NULL:
            asked = vulkan.ffi.cast(f"{kind} *", asked.pNext)
            if asked.sType == getattr(vulkan.library, f"STRUCTURE_TYPE_{kind}"):
                setattr(asked, feature, 0)

    error = refused(instead(vulkan, vkGetPhysicalDeviceFeatures2=without))
    assert f"lacks {feature}" in error.reason


def test_a_device_that_cannot_be_opened_is_named(vulkan):
    failed = vulkan.constant("ERROR_INITIALIZATION_FAILED")
    error = refused(instead(vulkan, vkCreateDevice=lambda real, *a: failed))
    assert "cannot be opened" in error.reason


def test_processors_come_last(vulkan, monkeypatch):
    """A graphics card is taken before a driver that computes on the processor."""
    with Instance(vulkan) as instance:
        (cpu, *_) = instance.devices()
        found: list[Device] = []
        for kind in (Kind.CPU, Kind.INTEGRATED, Kind.DISCRETE, Kind.VIRTUAL):
            found.append(replace(cpu, kind=kind, name=kind.name))
        handles = [object()] * len(found)
        monkeypatch.setattr(Vulkan, "list_all", lambda *a: handles)
        monkeypatch.setattr("accel.vulkan.device.describe", lambda *a: found.pop())
        names = [device.name for device in instance.devices()]
    assert names == ["DISCRETE", "INTEGRATED", "VIRTUAL", "CPU"]


def test_every_device_has_a_line(vulkan):
    """Driver, memory, features and kernels, as ``zinc-rt devices`` shows them."""
    with Instance(vulkan) as instance:
        devices = instance.devices()
    lines = device_lines()
    assert len(lines) == len(devices)
    for device, line in zip(devices, lines, strict=True):
        assert line.startswith(f"{device.name}: {device.driver}, Vulkan")
        assert f"{device.memory_bytes >> 20:,} MiB" in line
    assert kernels_of(ALL_NATIVE) == "packed dot products, nothing in integers"
    assert kernels_of(replace(ALL_NATIVE, root=False, dot=False)) == (
        "products without packed dot products, root in integers"
    )
