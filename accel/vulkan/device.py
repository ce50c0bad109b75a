"""Finds Vulkan devices, and reports what is missing when there is none."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from accel.vulkan.api import TIER, Vulkan, VulkanError
from accel.vulkan.matrices import has_matrices
from accel.vulkan.spirv import FLOAT_CONTROLS
from contract.context_manager import ContextManager
from contract.errors import TierUnavailable

MIN_VERSION = (1, 2)
DRIVER_HINT = "install the graphics card's Vulkan driver, or apt install mesa-vulkan-drivers"
NEWER_HINT = "install a newer driver, or choose another device with --vulkan-device"
FEATURES = ("shaderInt64", "shaderInt16")
FEATURES_11 = ("storageBuffer16BitAccess",)
FEATURES_12 = (
    *("storageBuffer8BitAccess", "shaderInt8"),
    *("bufferDeviceAddress", "timelineSemaphore"),
)
"""Features the tier needs, by the structure that has them."""
MEMORY_BUDGET = "VK_EXT_memory_budget"
INTEGER_DOT = "VK_KHR_shader_integer_dot_product"
MAINTENANCE_4 = "VK_KHR_maintenance4"
DEFAULT_MAX_BUFFER_BYTES = 1 << 30
"""Largest buffer where the device reports no limit; every device of Vulkan 1.1 and later can
allocate as much."""


class Kind(enum.IntEnum):
    """The kind of a device; devices are preferred in this order."""

    DISCRETE = 0
    INTEGRATED = 1
    VIRTUAL = 2
    OTHER = 3
    CPU = 4


@dataclass(frozen=True, slots=True)
class CacheKey:
    """The identity of the device and driver that a pipeline cache belongs to."""

    vendor: int
    device: int
    uuid: bytes
    driver: int


@dataclass(frozen=True, slots=True)
class Device:
    """One Vulkan device and its abilities. Sizes in bytes.

    ``missing`` names features that the tier needs and the device lacks, ``controls`` the float
    controls it has for binary32. ``matrices`` says whether it has the matrix units that
    ``accel/kernels/matrices.k`` uses."""

    handle: Any
    name: str
    driver: str
    kind: Kind
    version: tuple[int, int]
    memory_bytes: int
    host_unified: bool
    max_buffer_bytes: int
    max_groups: int
    group_memory_bytes: int
    extensions: frozenset[str]
    integer_dot: bool
    controls: tuple[str, ...]
    cache_key: CacheKey
    missing: tuple[str, ...]
    matrices: bool = False

    @property
    def vendor(self) -> int:
        """The vendor's number."""
        return self.cache_key.vendor

    @property
    def is_cpu(self) -> bool:
        """True for drivers that compute on the processor, such as lavapipe."""
        return self.kind is Kind.CPU

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the optional features it has."""
        has = {"integer dot product": self.integer_dot, "matrix units": self.matrices}
        has["memory budget"] = MEMORY_BUDGET in self.extensions
        return (*(name for name, there in has.items() if there), *self.controls)


class Instance(ContextManager):
    """A VkInstance and its devices. A context manager."""

    def __init__(self, vulkan: Vulkan) -> None:
        self.vulkan = vulkan
        major, minor = MIN_VERSION
        application = vulkan.structure("ApplicationInfo", apiVersion=major << 22 | minor << 12)
        information = vulkan.structure("InstanceCreateInfo", pApplicationInfo=application)
        try:
            self.handle = vulkan.create("Instance", None, information)
        except VulkanError as error:
            raise TierUnavailable(TIER, f"no Vulkan driver ({error})", DRIVER_HINT) from None

    def devices(self) -> list[Device]:
        """Every device, discrete ones first and processors last, including unusable ones. Raises
        TierUnavailable when there is none."""
        try:
            handles = self.vulkan.list_all(
                "EnumeratePhysicalDevices", "PhysicalDevice", self.handle
            )
        except VulkanError as error:
            raise TierUnavailable(TIER, f"no Vulkan driver ({error})", DRIVER_HINT) from None
        if not handles:
            raise TierUnavailable(TIER, "the Vulkan loader knows no device", DRIVER_HINT)
        found = [self._described(handle) for handle in handles]
        return sorted(found, key=lambda device: device.kind)

    def _described(self, handle: Any) -> Device:
        device = describe(self.vulkan, handle)
        return replace(device, matrices=has_matrices(self.vulkan, self.handle, device))

    def device(self, requested: str = "") -> Device:
        """The first usable device whose name or driver contains ``requested``, ignoring case.
        Raises TierUnavailable saying what each matching device lacks."""
        devices = self.devices()
        named = [d for d in devices if requested.lower() in f"{d.name} {d.driver}".lower()]
        if not named:
            names = ", ".join(device.name for device in devices)
            reason = f"no Vulkan device matches {requested!r}"
            raise TierUnavailable(TIER, reason, f"there is {names}")
        for device in named:
            if not device.missing:
                return device
        lacks = "; ".join(f"{device.name} lacks {', '.join(device.missing)}" for device in named)
        raise TierUnavailable(TIER, lacks, NEWER_HINT)

    def close(self) -> None:
        """Destroy the instance; nothing of it may be in use."""
        if self.handle is not None:
            self.vulkan.run("DestroyInstance", self.handle, self.vulkan.ffi.NULL)
            self.handle = None


def describe(vulkan: Vulkan, handle: Any) -> Device:
    """The properties of one physical device."""
    first = vulkan.structure("PhysicalDeviceProperties2")
    vulkan.run("GetPhysicalDeviceProperties2", handle, first)
    word = first.properties.apiVersion
    version = word >> 22 & 0x7F, word >> 12 & 0x3FF
    if version < MIN_VERSION:
        return _too_old(vulkan, handle, first.properties, version)
    extensions = frozenset(
        vulkan.ffi.string(extension.extensionName).decode()
        for extension in vulkan.list_all(
            "EnumerateDeviceExtensionProperties", "ExtensionProperties", handle, vulkan.ffi.NULL
        )
    )
    newest = version >= (1, 3)
    twelve = vulkan.structure("PhysicalDeviceVulkan12Properties")
    four = vulkan.structure("PhysicalDeviceMaintenance4Properties")
    if newest or MAINTENANCE_4 in extensions:
        twelve.pNext = four
    both = vulkan.structure("PhysicalDeviceProperties2", pNext=twelve)
    vulkan.run("GetPhysicalDeviceProperties2", handle, both)
    limits = both.properties.limits
    missing, integer_dot = _features(vulkan, handle, newest or INTEGER_DOT in extensions)
    largest, unified = _memory(vulkan, handle)
    kind = _kind(vulkan, both.properties.deviceType)
    names = [vulkan.ffi.string(x).decode() for x in (twelve.driverName, twelve.driverInfo)]
    return Device(
        handle=handle,
        name=vulkan.ffi.string(both.properties.deviceName).decode(),
        driver=" ".join(filter(None, names)),
        kind=kind,
        version=version,
        memory_bytes=largest,
        host_unified=unified and kind is not Kind.DISCRETE,
        max_buffer_bytes=int(four.maxBufferSize) or DEFAULT_MAX_BUFFER_BYTES,
        max_groups=int(limits.maxComputeWorkGroupCount[0]),
        group_memory_bytes=int(limits.maxComputeSharedMemorySize),
        extensions=extensions,
        integer_dot=integer_dot,
        controls=tuple(mode for mode in FLOAT_CONTROLS if getattr(twelve, f"shader{mode}Float32")),
        cache_key=_cache_key(vulkan, both.properties),
        missing=missing,
    )


def _features(vulkan: Vulkan, handle: Any, asks_dot: bool) -> tuple[tuple[str, ...], bool]:
    """Names of missing features, and whether the device has packed dot products."""
    chain, all_three, dot = feature_chain(vulkan, asks_dot)
    vulkan.run("GetPhysicalDeviceFeatures2", handle, chain)
    needed = zip(all_three, (FEATURES, FEATURES_11, FEATURES_12), strict=True)
    missing = [name for found, names in needed for name in names if not getattr(found, name)]
    return tuple(missing), bool(dot.shaderIntegerDotProduct)


def feature_chain(vulkan: Vulkan, with_dot: bool) -> tuple[Any, tuple[Any, Any, Any], Any]:
    """VkPhysicalDeviceFeatures2 with the structures linked to it: those of 1.0, 1.1 and 1.2, and
    that of packed dot products, which is linked only ``with_dot``."""
    dot = vulkan.structure("PhysicalDeviceShaderIntegerDotProductFeatures")
    twelve = vulkan.structure("PhysicalDeviceVulkan12Features")
    if with_dot:
        twelve = vulkan.structure("PhysicalDeviceVulkan12Features", pNext=dot)
    eleven = vulkan.structure("PhysicalDeviceVulkan11Features", pNext=twelve)
    chain = vulkan.structure("PhysicalDeviceFeatures2", pNext=eleven)
    return chain, (chain.features, eleven, twelve), dot


def _memory(vulkan: Vulkan, handle: Any) -> tuple[int, bool]:
    """Bytes of the largest device-local heap, and whether the host can access it as its own
    memory."""
    found = vulkan.structure("PhysicalDeviceMemoryProperties2")
    vulkan.run("GetPhysicalDeviceMemoryProperties2", handle, found)
    memory = found.memoryProperties
    local = vulkan.flags("MEMORY_HEAP", "DEVICE_LOCAL")
    heaps = [
        (int(memory.memoryHeaps[i].size), i)
        for i in range(memory.memoryHeapCount)
        if memory.memoryHeaps[i].flags & local
    ]
    if not heaps:
        return 0, False
    nbytes, heap = max(heaps)
    shared = vulkan.flags(
        "MEMORY_PROPERTY", "DEVICE_LOCAL", "HOST_VISIBLE", "HOST_COHERENT", "HOST_CACHED"
    )
    types = [memory.memoryTypes[i] for i in range(memory.memoryTypeCount)]
    return nbytes, any(t.heapIndex == heap and t.propertyFlags & shared == shared for t in types)


def _kind(vulkan: Vulkan, number: int) -> Kind:
    names = {"DISCRETE_GPU": Kind.DISCRETE, "INTEGRATED_GPU": Kind.INTEGRATED}
    names |= {"VIRTUAL_GPU": Kind.VIRTUAL, "CPU": Kind.CPU}
    for name, kind in names.items():
        if vulkan.constant(f"PHYSICAL_DEVICE_TYPE_{name}") == number:
            return kind
    return Kind.OTHER


def _too_old(vulkan: Vulkan, handle: Any, properties: Any, version: tuple[int, int]) -> Device:
    """A device whose version does not even report what it lacks."""
    return Device(
        handle=handle,
        name=vulkan.ffi.string(properties.deviceName).decode(),
        driver=f"version {properties.driverVersion}",
        kind=_kind(vulkan, properties.deviceType),
        version=version,
        memory_bytes=0,
        host_unified=False,
        max_buffer_bytes=0,
        max_groups=0,
        group_memory_bytes=0,
        extensions=frozenset(),
        integer_dot=False,
        controls=(),
        cache_key=_cache_key(vulkan, properties),
        missing=(f"Vulkan {MIN_VERSION[0]}.{MIN_VERSION[1]} (it has {version[0]}.{version[1]})",),
    )


def _cache_key(vulkan: Vulkan, properties: Any) -> CacheKey:
    return CacheKey(
        properties.vendorID,
        properties.deviceID,
        bytes(vulkan.ffi.buffer(properties.pipelineCacheUUID)),
        properties.driverVersion,
    )
