"""Detects matrix units (VK_KHR_cooperative_matrix) that ``accel/kernels/matrices.k`` can use."""

from __future__ import annotations

from typing import Any, Protocol

from accel.vulkan.api import Vulkan

EXTENSION = "VK_KHR_cooperative_matrix"
PROPERTIES = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
VENDORS = frozenset({0x10DE})
"""Vendors whose matrix units were tested: NVIDIA. Some drivers crash when their properties are
queried."""
SHAPE = (16, 16, 32)
"""Rows, columns and products in a sum."""
SUBGROUP_ITEMS = 32
GROUP_MEMORY_BYTES = 48 << 10
"""Group memory that ``accel/kernels/matmul_tiles.k`` may need."""


class Candidate(Protocol):
    """A device that may have matrix units."""

    @property
    def handle(self) -> Any:
        """The VkPhysicalDevice."""

    @property
    def extensions(self) -> frozenset[str]:
        """Names of its extensions."""

    @property
    def vendor(self) -> int:
        """The vendor's number."""

    @property
    def group_memory_bytes(self) -> int:
        """Group memory of a work-group."""


def has_matrices(vulkan: Vulkan, instance: Any, device: Candidate) -> bool:
    """Whether the device multiplies matrices of signed bytes in subgroups of 32 items that support
    shuffles. Results are tested when the device is opened."""
    return (
        EXTENSION in device.extensions
        and device.vendor in VENDORS
        and device.group_memory_bytes >= GROUP_MEMORY_BYTES
        and _has_subgroups(vulkan, device)
        and _has_features(vulkan, device)
        and _has_shape(vulkan, instance, device)
    )


def matrix_features(vulkan: Vulkan, behind: Any) -> Any:
    """The feature structure with which the device is opened, linked to the chain ``behind``."""
    return vulkan.structure(
        "PhysicalDeviceCooperativeMatrixFeaturesKHR", pNext=behind, cooperativeMatrix=1
    )


def _has_subgroups(vulkan: Vulkan, device: Candidate) -> bool:
    eleven = vulkan.structure("PhysicalDeviceVulkan11Properties")
    chain = vulkan.structure("PhysicalDeviceProperties2", pNext=eleven)
    vulkan.run("GetPhysicalDeviceProperties2", device.handle, chain)
    shuffles = eleven.subgroupSupportedOperations & vulkan.flags("SUBGROUP_FEATURE", "SHUFFLE")
    return bool(eleven.subgroupSize == SUBGROUP_ITEMS and shuffles)


def _has_features(vulkan: Vulkan, device: Candidate) -> bool:
    matrices = vulkan.structure("PhysicalDeviceCooperativeMatrixFeaturesKHR")
    twelve = vulkan.structure("PhysicalDeviceVulkan12Features", pNext=matrices)
    chain = vulkan.structure("PhysicalDeviceFeatures2", pNext=twelve)
    vulkan.run("GetPhysicalDeviceFeatures2", device.handle, chain)
    return bool(matrices.cooperativeMatrix and twelve.vulkanMemoryModel)


def _has_shape(vulkan: Vulkan, instance: Any, device: Candidate) -> bool:
    found = vulkan.run("GetInstanceProcAddr", instance, vulkan.text(PROPERTIES))
    if found == vulkan.ffi.NULL:
        return False
    function = vulkan.ffi.cast("PFN_GetCooperativeMatrixProperties", found)
    count = vulkan.ffi.new("uint32_t *")
    if function(device.handle, count, vulkan.ffi.NULL) < 0:
        return False
    listed = vulkan.array("VkCooperativeMatrixPropertiesKHR", int(count[0]))
    for entry in listed:
        entry.sType = vulkan.library.STRUCTURE_TYPE_VkCooperativeMatrixPropertiesKHR
    if function(device.handle, count, listed) < 0:
        return False
    byte = vulkan.constant("COMPONENT_TYPE_SINT8_KHR")
    word = vulkan.constant("COMPONENT_TYPE_SINT32_KHR")
    requested = (*SHAPE, byte, byte, word, word, 0, vulkan.constant("SCOPE_SUBGROUP_KHR"))
    return any(
        requested
        == (
            *(entry.MSize, entry.NSize, entry.KSize),
            *(entry.AType, entry.BType, entry.CType, entry.ResultType),
            *(entry.saturatingAccumulation, entry.scope),
        )
        for entry in listed[0 : int(count[0])]
    )
