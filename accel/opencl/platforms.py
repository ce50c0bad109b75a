"""OpenCL's platforms and devices, and the properties that they report."""

from __future__ import annotations

import ctypes

from accel.opencl.api import handles, information, number, opencl, text
from contract.lazy_dataclass import dataclass

ANY_DEVICE = 0xFFFFFFFF
CPU = 1 << 1
"""The device type of processors."""
CORRECTLY_ROUNDED_DIVIDE_SQRT = 1 << 7


class Info:
    """Numbers of the properties that platforms and devices report."""

    PLATFORM_VERSION, PLATFORM_NAME = 0x0901, 0x0902
    TYPE, COMPUTE_UNITS = 0x1000, 0x1002
    MAX_ALLOCATION, FP_CONFIG, GLOBAL_MEMORY = 0x1010, 0x101B, 0x101F
    LITTLE_ENDIAN, AVAILABLE, COMPILER_AVAILABLE = 0x1026, 0x1027, 0x1028
    NAME, DRIVER_VERSION, VERSION, HOST_UNIFIED = 0x102B, 0x102D, 0x102F, 0x1035


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """A device, which reports its properties. Raises Error. Sizes are in bytes."""

    handle: int

    def text(self, property_id: int) -> str:
        """A property that is a text."""
        return text(information(opencl().GetDeviceInfo, self.handle, property_id))

    def number(self, property_id: int) -> int:
        """A property that is a number."""
        return number(information(opencl().GetDeviceInfo, self.handle, property_id))


@dataclass(frozen=True, slots=True)
class Platform:
    """A driver and its devices."""

    handle: int

    def text(self, property_id: int) -> str:
        """A property that is a text."""
        return text(information(opencl().GetPlatformInfo, self.handle, property_id))

    def get_devices(self) -> list[DeviceHandle]:
        """All devices. Raises Error, also when there is none."""
        count = ctypes.c_uint()
        cl = opencl()
        cl.GetDeviceIDs(self.handle, ANY_DEVICE, 0, None, ctypes.byref(count))
        found = handles([0] * count.value)
        cl.GetDeviceIDs(self.handle, ANY_DEVICE, count.value, found, None)
        return [DeviceHandle(handle) for handle in found]


def get_platforms() -> list[Platform]:
    """All drivers of the system. Raises Error, also when there is none."""
    count = ctypes.c_uint()
    cl = opencl()
    cl.GetPlatformIDs(0, None, ctypes.byref(count))
    found = handles([0] * count.value)
    cl.GetPlatformIDs(count.value, found, None)
    return [Platform(handle) for handle in found]
