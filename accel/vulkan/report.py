"""Describes the Vulkan devices of a machine."""

from __future__ import annotations

from accel.kernels.device_probe import device_line
from accel.vulkan.api import load_vulkan
from accel.vulkan.device import Device, Instance
from accel.vulkan.runtime import Choices
from accel.vulkan.tier import VulkanTier

MEBIBYTE = 1 << 20


def device_lines() -> tuple[str, ...]:
    """A line for every device: driver, memory, features, and which kernels it runs. Raises
    TierUnavailable if there is no loader or no device."""
    vulkan = load_vulkan()
    with Instance(vulkan) as instance:
        devices = instance.devices()
    return tuple(_line(device) for device in devices)


def _line(device: Device) -> str:
    memory = f"{device.memory_bytes // MEBIBYTE:,} MiB{' shared' if device.host_unified else ''}"
    version = f"Vulkan {device.version[0]}.{device.version[1]}"
    about = f"{device.name}: {device.driver}, {version}, {memory}"
    if not device.missing:
        about += f"; {', '.join(device.features) or 'no optional features'}"
    return device_line(about, device.missing, lambda: VulkanTier(device.name, Choices()))


if __name__ == "__main__":
    print(*device_lines(), sep="\n")
