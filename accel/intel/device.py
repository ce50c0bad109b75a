"""Finds the GPUs that Level Zero lists, and reports what each lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.intel.api import LOADER_HINT, TIER, LevelZero, LevelZeroError
from contract.errors import DeviceLost, TierUnavailable

NO_DRIVER = "Level Zero has no driver for a GPU"
NO_DEVICE = "Level Zero lists no GPU"
ACCESS_HINT = "add your user to the group render, which may open /dev/dri/renderD*"
SPIRV_VERSION = 1 << 16 | 2
"""SPIR-V 1.2, for which the kernels are compiled."""
GROUP_ITEMS = 256
"""Most items of a work-group of the kernels."""
GROUP_MEMORY_BYTES = 16 << 10
"""Group memory that the kernels may need."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU and its driver. Sizes in bytes.

    ``ordinal`` is its first group of queues that compute. ``missing`` names what it lacks."""

    driver_handle: Any
    handle: Any
    name: str
    driver: str
    memory_bytes: int
    max_buffer_bytes: int
    integrated: bool
    ordinal: int
    max_groups: int
    missing: tuple[str, ...]


def all_devices(zero: LevelZero) -> list[Device]:
    """Every GPU, those that lack something too. Raises TierUnavailable if there is none."""
    try:
        zero.call("Init", zero.constant("INIT_FLAG_GPU_ONLY"))
        drivers = zero.list_all("DriverGet", "driver")
        found = [
            _described(zero, driver, handle)
            for driver in drivers
            for handle in zero.list_all("DeviceGet", "device", driver)
            if _properties(zero, handle).type == zero.constant("DEVICE_TYPE_GPU")
        ]
    except LevelZeroError as error:
        reason, hint = NO_DRIVER, LOADER_HINT
        if error.meaning != "ZE_RESULT_ERROR_UNINITIALIZED":
            reason = f"Level Zero does not start ({error})"
        raise TierUnavailable(TIER, reason, hint) from None
    except DeviceLost as error:
        raise TierUnavailable(TIER, str(error), "start the machine again") from None
    if not found:
        raise TierUnavailable(TIER, NO_DEVICE, ACCESS_HINT)
    return found


def chosen_device(zero: LevelZero, requested: str = "") -> Device:
    """The GPU number ``requested``, or the first whose name contains it, ignoring case. Raises
    TierUnavailable when there is none, or saying what it lacks."""
    devices = all_devices(zero)
    there = ", ".join(f"{number}: {device.name}" for number, device in enumerate(devices))
    if requested.isdecimal():
        fitting = devices[int(requested) : int(requested) + 1]
    else:
        fitting = [device for device in devices if requested.lower() in device.name.lower()]
    if not fitting:
        raise TierUnavailable(TIER, f"no GPU matches {requested!r}", f"there is {there}")
    complete = [device for device in fitting if not device.missing]
    if not complete:
        reason = f"{fitting[0].name} lacks {', '.join(fitting[0].missing)}"
        raise TierUnavailable(TIER, reason, "choose another device or a newer driver")
    return complete[0]


def _properties(zero: LevelZero, handle: Any) -> Any:
    found = zero.structure("device_properties")
    zero.call("DeviceGetProperties", handle, found)
    return found


def _described(zero: LevelZero, driver: Any, handle: Any) -> Device:
    properties = _properties(zero, handle)
    compute = zero.structure("device_compute_properties")
    zero.call("DeviceGetComputeProperties", handle, compute)
    modules = zero.structure("device_module_properties")
    zero.call("DeviceGetModuleProperties", handle, modules)
    groups = zero.list_all(
        "DeviceGetCommandQueueGroupProperties", "command_queue_group_properties", handle
    )
    computing = zero.constant("COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE")
    ordinals = [number for number, group in enumerate(groups) if group.flags & computing]
    memories = zero.list_all("DeviceGetMemoryProperties", "device_memory_properties", handle)
    supported = {
        "a queue that computes": bool(ordinals),
        "SPIR-V 1.2": modules.spirvVersionSupported >= SPIRV_VERSION,
        "binary16": bool(modules.flags & zero.constant("DEVICE_MODULE_FLAG_FP16")),
        f"work-groups of {GROUP_ITEMS} items": compute.maxTotalGroupSize >= GROUP_ITEMS
        and compute.maxGroupSizeX >= GROUP_ITEMS,
        f"{GROUP_MEMORY_BYTES} bytes of group memory": compute.maxSharedLocalMemory
        >= GROUP_MEMORY_BYTES,
    }
    return Device(
        driver,
        handle,
        zero.ffi.string(properties.name).decode(errors="replace"),
        _driver_text(zero, driver),
        sum(int(memory.totalSize) for memory in memories[:1]),
        int(properties.maxMemAllocSize),
        bool(properties.flags & zero.constant("DEVICE_PROPERTY_FLAG_INTEGRATED")),
        ordinals[0] if ordinals else 0,
        int(compute.maxGroupCountX),
        tuple(name for name, there in supported.items() if not there),
    )


def _driver_text(zero: LevelZero, driver: Any) -> str:
    version = zero.ffi.new("uint32_t *")
    zero.call("DriverGetApiVersion", driver, version)
    found = zero.structure("driver_properties")
    zero.call("DriverGetProperties", driver, found)
    api = f"Level Zero {version[0] >> 16}.{version[0] & 0xFFFF}"
    number = int(found.driverVersion)
    return f"{api}, driver {number >> 24}.{number >> 16 & 255}.{number & 0xFFFF}"
