"""OpenCL's platforms and devices, and the properties that they report."""

from __future__ import annotations

import ctypes

from accel.opencl.api import handles, information, number, opencl, text

ANY_DEVICE = 0xFFFFFFFF
CPU = 1 << 1
"""The device type of processors."""
CORRECTLY_ROUNDED_DIVIDE_SQRT = 1 << 7

_PLATFORM_VERSION, _PLATFORM_NAME = 0x0901, 0x0902
_TYPE, _COMPUTE_UNITS = 0x1000, 0x1002
_MAX_ALLOCATION, _FP_CONFIG, _GLOBAL_MEMORY = 0x1010, 0x101B, 0x101F
_LITTLE_ENDIAN, _AVAILABLE, _COMPILER_AVAILABLE = 0x1026, 0x1027, 0x1028
_NAME, _DRIVER_VERSION, _VERSION, _HOST_UNIFIED = 0x102B, 0x102D, 0x102F, 0x1035


class DeviceHandle:
    """The properties that a device reports. Raises Error. Sizes are in bytes."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def _text(self, what: int) -> str:
        return text(information(opencl().GetDeviceInfo, self.handle, what))

    def _number(self, what: int) -> int:
        return number(information(opencl().GetDeviceInfo, self.handle, what))

    @property
    def name(self) -> str:
        return self._text(_NAME)

    @property
    def version(self) -> str:
        """The version text: ``OpenCL <major>.<minor> <vendor's text>``."""
        return self._text(_VERSION)

    @property
    def driver_version(self) -> str:
        return self._text(_DRIVER_VERSION)

    @property
    def usable(self) -> bool:
        """Whether it is available, has a compiler, and is little-endian."""
        asked = (_AVAILABLE, _COMPILER_AVAILABLE, _LITTLE_ENDIAN)
        return all(self._number(what) for what in asked)

    @property
    def type(self) -> int:
        return self._number(_TYPE)

    @property
    def single_fp_config(self) -> int:
        return self._number(_FP_CONFIG)

    @property
    def max_compute_units(self) -> int:
        return self._number(_COMPUTE_UNITS)

    @property
    def global_mem_size(self) -> int:
        return self._number(_GLOBAL_MEMORY)

    @property
    def max_mem_alloc_size(self) -> int:
        return self._number(_MAX_ALLOCATION)

    @property
    def host_unified_memory(self) -> bool:
        return self._number(_HOST_UNIFIED) != 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceHandle) and other.handle == self.handle

    def __hash__(self) -> int:
        return hash(self.handle)


class Platform:
    """A driver and its devices."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @property
    def name(self) -> str:
        return text(information(opencl().GetPlatformInfo, self.handle, _PLATFORM_NAME))

    @property
    def version(self) -> str:
        return text(information(opencl().GetPlatformInfo, self.handle, _PLATFORM_VERSION))

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
