"""Describes the CUDA devices of a machine."""

from __future__ import annotations

from typing import Any

from accel.cuda.device import MIN_CAPABILITY, Device, find_devices
from accel.cuda.driver import Driver, open_driver

MEBIBYTE = 1 << 20


def device_lines(binding: Any = None) -> tuple[str, ...]:
    """A line for every device: number, architecture, memory, and the devices with which it can form
    one tier because it can access their memory. ``binding`` as in ``open_driver``. Raises
    TierUnavailable if there is no driver or no device."""
    driver = open_driver(binding)
    devices = find_devices(driver)
    return tuple(_line(driver, device, devices) for device in devices)


def reaches(driver: Driver, one: Device, other: Device) -> bool:
    """Whether kernels of ``one`` can access the memory of ``other``."""
    handles = [driver.call("cuDeviceGet", device.ordinal) for device in (one, other)]
    return bool(driver.call("cuDeviceCanAccessPeer", *handles))


def _line(driver: Driver, device: Device, devices: list[Device]) -> str:
    about = f"{device.ordinal} {device.name}: {device.architecture}"
    about += f", {device.memory_bytes // MEBIBYTE:,} MiB"
    if device.capability < MIN_CAPABILITY:
        return f"{about}; too old"
    reached = [
        str(other.ordinal)
        for other in devices
        if other is not device and reaches(driver, device, other)
    ]
    return f"{about}; reaches {', '.join(reached)}" if reached else about
