"""Finds an OpenCL device, or reports what is missing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from accel.opencl import binding
from accel.opencl.api import LIBRARY, opencl
from accel.opencl.driver import TIER, check_threads, wait_for_drivers
from accel.opencl.platforms import CORRECTLY_ROUNDED_DIVIDE_SQRT, CPU, DeviceHandle, Info, Platform
from contract.errors import TierUnavailable
from contract.extras import install_command
from contract.lazy_dataclass import dataclass

ICD_HINT = "apt install pocl-opencl-icd, or install the vendor's OpenCL driver"
MIN_VERSION = (1, 2)
POCL = "Portable Computing Language"
POCL_COMPILES_ONCE = ("POCL_WORK_GROUP_SPECIALIZATION", "0")
"""An environment variable and its value. Without it PoCL compiles every kernel twice: for any
work-group size and for the size in use."""


def import_binding() -> ModuleType:
    """The module of OpenCL's objects. Raises TierUnavailable, which names what to install."""
    try:
        opencl()
    except (OSError, AttributeError) as error:
        remedy = f"apt install ocl-icd-libopencl1, or {install_command('opencl')}"
        raise TierUnavailable(TIER, f"{LIBRARY} cannot be used ({error})", remedy) from None
    return binding


@dataclass(frozen=True, slots=True)
class Device:
    """One OpenCL device and its properties. Sizes are in bytes."""

    handle: Any
    platform: str
    name: str
    driver: str
    is_cpu: bool
    compute_units: int
    memory_bytes: int
    max_allocation_bytes: int
    host_unified: bool
    correctly_rounded: bool
    """Whether the compiler accepts -cl-fp32-correctly-rounded-divide-sqrt."""

    @property
    def is_pocl(self) -> bool:
        """Whether this is PoCL, whose worker threads belong to this process."""
        return self.platform.startswith(POCL)


def find_devices() -> list[Device]:
    """All usable OpenCL devices, accelerators before CPUs. Raises TierUnavailable when the library,
    a platform or a device is missing."""
    cl = import_binding()
    wait_for_drivers()
    check_threads()
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        reason = f"no OpenCL platform ({_first_line(error)})"
        raise TierUnavailable(TIER, reason, ICD_HINT) from None
    devices = []
    for platform in platforms:
        try:
            handles = platform.get_devices()
        except cl.Error:
            continue
        devices += [_describe(platform, handle) for handle in handles if _usable(handle)]
    if not devices:
        raise TierUnavailable(
            TIER, f"{len(platforms)} OpenCL platforms, but no device of OpenCL 1.2", ICD_HINT
        )
    return sorted(devices, key=lambda device: device.is_cpu)


def find_device(requested: str = "") -> Device:
    """The first device whose platform or name contains ``requested``, ignoring case."""
    devices = find_devices()
    for device in devices:
        if requested.lower() in f"{device.platform} {device.name}".lower():
            return device
    names = ", ".join(device.name for device in devices)
    raise TierUnavailable(TIER, f"no OpenCL device matches {requested!r}", f"there is {names}")


def _usable(handle: DeviceHandle) -> bool:
    # "OpenCL <major>.<minor> <vendor text>"
    major, minor = handle.text(Info.VERSION).split()[1].split(".")[:2]
    needed = Info.AVAILABLE, Info.COMPILER_AVAILABLE, Info.LITTLE_ENDIAN
    return (int(major), int(minor)) >= MIN_VERSION and all(map(handle.number, needed))


def _describe(platform: Platform, handle: DeviceHandle) -> Device:
    config = handle.number(Info.FP_CONFIG)
    return Device(
        handle=handle,
        platform=f"{platform.text(Info.PLATFORM_NAME)} {platform.text(Info.PLATFORM_VERSION)}",
        name=handle.text(Info.NAME).strip(),
        driver=handle.text(Info.DRIVER_VERSION),
        is_cpu=bool(handle.number(Info.TYPE) & CPU),
        compute_units=handle.number(Info.COMPUTE_UNITS),
        memory_bytes=handle.number(Info.GLOBAL_MEMORY),
        max_allocation_bytes=handle.number(Info.MAX_ALLOCATION),
        host_unified=handle.number(Info.HOST_UNIFIED) != 0,
        correctly_rounded=bool(config & CORRECTLY_ROUNDED_DIVIDE_SQRT),
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
