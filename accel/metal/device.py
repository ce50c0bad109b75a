"""Finds the Metal device of a machine, and reports what it lacks."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

from accel.metal.objc import NO_METAL_HINT, TIER, MetalError, ObjectiveC
from contract.errors import TierUnavailable

NO_DEVICE = "macOS knows no Metal device"
NEWER_HINT = "the tier needs Apple silicon (M1 or newer) and macOS 13 or newer"
FAMILIES = {"Apple7": 1007, "Metal3": 5001}
"""MTLGPUFamily values that the tier needs for buffer addresses and indirect command buffers."""
APPLE9 = 1009
"""From this family on indirect commands include their pipelines."""
GROUP_MEMORY_BYTES = 16 << 10
"""Group memory that the kernels may need."""

DEVICE_METHODS = (
    *("name", "supportsFamily:", "hasUnifiedMemory", "recommendedMaxWorkingSetSize"),
    *("currentAllocatedSize", "maxBufferLength", "maxThreadgroupMemoryLength"),
    *("newCommandQueue", "newSharedEvent", "newBufferWithLength:options:"),
    "newBufferWithBytesNoCopy:length:options:deallocator:",
    "newLibraryWithSource:options:error:",
    "newComputePipelineStateWithDescriptor:options:reflection:error:",
    "newIndirectCommandBufferWithDescriptor:maxCommandCount:options:",
)


@dataclass(frozen=True, slots=True)
class Device:
    """One MTLDevice, owned by the caller. Sizes in bytes.

    ``missing`` names what it lacks, ``dispatches_pipelines`` says that an encoder must dispatch a
    pipeline before indirect commands may use it there."""

    handle: Any
    name: str
    driver: str
    memory_bytes: int
    max_buffer_bytes: int
    unified: bool
    dispatches_pipelines: bool
    missing: tuple[str, ...]


def default_device(objc: ObjectiveC, requested: str = "") -> Device:
    """The device of this machine, if its name contains ``requested``, ignoring case. Raises
    TierUnavailable when there is none, or saying what it lacks."""
    device = any_device(objc)
    reason, hint = "", NEWER_HINT
    if device.missing:
        reason = f"{device.name} lacks {', '.join(device.missing)}"
    elif requested.lower() not in device.name.lower():
        reason, hint = f"no Metal device matches {requested!r}", f"there is {device.name}"
    if reason:
        objc.release(device.handle)
        raise TierUnavailable(TIER, reason, hint)
    return device


def any_device(objc: ObjectiveC) -> Device:
    """The device of this machine, even if it lacks something. Raises TierUnavailable."""
    handle = objc.metal.MTLCreateSystemDefaultDevice()
    if handle == objc.ffi.NULL:
        raise TierUnavailable(TIER, NO_DEVICE, NO_METAL_HINT)
    try:
        with objc.pool():
            return _described(objc, handle)
    except MetalError as error:
        objc.release(handle)
        raise TierUnavailable(TIER, str(error), NEWER_HINT) from None


def _described(objc: ObjectiveC, handle: Any) -> Device:
    objc.check(handle, DEVICE_METHODS[:7])
    send = objc.send
    missing = [
        f"GPU family {name}"
        for name, family in FAMILIES.items()
        if not send(handle, "supportsFamily:", family)
    ]
    unified = bool(send(handle, "hasUnifiedMemory"))
    if not unified:
        missing.append("memory it shares with the host")
    if send(handle, "maxThreadgroupMemoryLength") < GROUP_MEMORY_BYTES:
        missing.append(f"{GROUP_MEMORY_BYTES} bytes of group memory")
    if not missing:
        objc.check(handle, DEVICE_METHODS)
    system = "simulated" if objc.simulated else f"macOS {platform.mac_ver()[0]}"
    return Device(
        handle,
        objc.text(send(handle, "name")),
        f"Metal, {system}",
        int(send(handle, "recommendedMaxWorkingSetSize")),
        int(send(handle, "maxBufferLength")),
        unified,
        not send(handle, "supportsFamily:", APPLE9),
        tuple(missing),
    )
