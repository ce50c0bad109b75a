"""Describes the Metal device of a machine."""

from __future__ import annotations

from accel.kernels.device_probe import device_line
from accel.metal.device import any_device
from accel.metal.objc import ObjectiveC, load_metal
from accel.metal.tier import MetalTier

MEBIBYTE = 1 << 20


def device_lines(objc: ObjectiveC | None = None) -> tuple[str, ...]:
    """A line about the device: system, memory, and what it lacks or which kernels it runs. Raises
    TierUnavailable if there is no framework or no device."""
    objc = objc or load_metal()
    device = any_device(objc)
    objc.release(device.handle)
    about = f"{device.name}: {device.driver}, {device.memory_bytes // MEBIBYTE:,} MiB shared"
    return (device_line(about, device.missing, lambda: MetalTier(metal=objc)),)


if __name__ == "__main__":
    print(*device_lines(), sep="\n")
