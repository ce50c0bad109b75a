"""Describes the GPUs that Level Zero lists."""

from __future__ import annotations

from accel.intel.api import LevelZero, load_level_zero
from accel.intel.device import Device, all_devices
from accel.intel.runtime import Choices
from accel.intel.tier import IntelTier
from accel.kernels.device_probe import device_line

MEBIBYTE = 1 << 20


def device_lines(zero: LevelZero | None = None) -> tuple[str, ...]:
    """A line for every GPU: driver, memory, and what it lacks or which kernels it runs. Raises
    TierUnavailable if there is no loader or no GPU."""
    zero = zero or load_level_zero()
    devices = all_devices(zero)
    return tuple(_line(zero, number, device) for number, device in enumerate(devices))


def _line(zero: LevelZero, number: int, device: Device) -> str:
    shared = " shared" if device.integrated else ""
    memory = f"{device.memory_bytes // MEBIBYTE:,} MiB{shared}"
    about = f"{number}: {device.name}: {device.driver}, {memory}"
    return device_line(about, device.missing, lambda: IntelTier(str(number), Choices(), zero))


if __name__ == "__main__":
    print(*device_lines(), sep="\n")
