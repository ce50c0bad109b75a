"""Writes ``declarations.h``, the parts of Vulkan's own header that this tier calls, and
``bindings.py``, made from it and ``matrices.h``, which cffi loads without a C parser.

python -m accel.vulkan.declare /usr/include/vulkan/vulkan_core.h"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import cffi

FOLDER = Path(__file__).parent
HEADERS = ("declarations.h", "matrices.h")
BINDINGS = "bindings.py"

FUNCTIONS = (
    *("CreateInstance", "DestroyInstance", "EnumerateInstanceVersion"),
    *("EnumeratePhysicalDevices", "EnumerateDeviceExtensionProperties"),
    *("GetPhysicalDeviceProperties2", "GetPhysicalDeviceFeatures2"),
    *("GetPhysicalDeviceQueueFamilyProperties", "GetPhysicalDeviceMemoryProperties2"),
    *("CreateDevice", "DestroyDevice", "DeviceWaitIdle", "GetDeviceQueue"),
    *("CreateBuffer", "DestroyBuffer", "GetBufferMemoryRequirements", "GetBufferDeviceAddress"),
    *("AllocateMemory", "FreeMemory", "BindBufferMemory", "MapMemory"),
    *("CreateShaderModule", "DestroyShaderModule"),
    *("CreatePipelineLayout", "DestroyPipelineLayout"),
    *("CreatePipelineCache", "GetPipelineCacheData", "DestroyPipelineCache"),
    *("CreateComputePipelines", "DestroyPipeline"),
    *("CreateCommandPool", "DestroyCommandPool"),
    *("AllocateCommandBuffers", "FreeCommandBuffers", "BeginCommandBuffer", "EndCommandBuffer"),
    *("CmdBindPipeline", "CmdPushConstants", "CmdDispatch", "CmdPipelineBarrier"),
    *("CmdCopyBuffer", "CmdFillBuffer"),
    *("CreateSemaphore", "DestroySemaphore", "WaitSemaphores", "GetSemaphoreCounterValue"),
    "QueueSubmit",
)
"""Names without ``vk``: core functions of Vulkan 1.2, which every loader exports."""
STRUCTURES = (
    "VkPhysicalDeviceVulkan11Features",
    "VkPhysicalDeviceVulkan12Features",
    "VkPhysicalDeviceVulkan11Properties",
    "VkPhysicalDeviceVulkan12Properties",
    "VkPhysicalDeviceMaintenance3Properties",
    "VkPhysicalDeviceMaintenance4Properties",
    "VkPhysicalDeviceMemoryBudgetPropertiesEXT",
    "VkPhysicalDeviceShaderIntegerDotProductFeatures",
    "VkSemaphoreTypeCreateInfo",
    "VkTimelineSemaphoreSubmitInfo",
    "VkMemoryAllocateFlagsInfo",
)
"""Structures linked through ``pNext``, which no function's declaration mentions."""
ENUMERATIONS = (
    *("VkResult", "VkPhysicalDeviceType", "VkSemaphoreType", "VkDriverId"),
    *("VkPipelineBindPoint", "VkMemoryPropertyFlagBits", "VkMemoryHeapFlagBits"),
    *("VkMemoryAllocateFlagBits", "VkBufferUsageFlagBits", "VkQueueFlagBits", "VkAccessFlagBits"),
    *("VkPipelineStageFlagBits", "VkShaderStageFlagBits", "VkCommandBufferUsageFlagBits"),
)
"""Enumerations whose values are declared as well."""
LONG_WORDS = ("VkFlags64", "VkDeviceSize", "VkDeviceAddress")

PREAMBLE = """\
// Made by accel/vulkan/declare.py from vulkan_core.h, header version {version}.
// Copyright 2015-2022 The Khronos Group Inc.
// SPDX-License-Identifier: Apache-2.0
"""


class Header:
    """``vulkan_core.h``, parsed."""

    def __init__(self, text: str) -> None:
        self.text = text
        found = re.findall(r"typedef (?:struct|union) (\w+) \{[^}]*\} \w+;", text)
        bodies = re.finditer(r"typedef (?:struct|union) \w+ \{[^}]*\} \w+;", text)
        self.structures = dict(zip(found, (body.group() for body in bodies), strict=True))
        self.enumerations = dict(re.findall(r"typedef enum (\w+) \{([^}]*)\} \w+;", text))
        self.aliases = {new: old for old, new in re.findall(r"typedef (Vk\w+) (Vk\w+);", text)}
        handles = r"VK_DEFINE_(?:NON_DISPATCHABLE_)?HANDLE\((\w+)\)"
        self.handles = frozenset(re.findall(handles, text))
        functions = r"VKAPI_ATTR (\w+) VKAPI_CALL vk(\w+)\(([^)]*)\);"
        self.functions = {
            name: (result, " ".join(arguments.split()))
            for result, name, arguments in re.findall(functions, text)
        }

    @property
    def version(self) -> str:
        """``VK_HEADER_VERSION``."""
        return self.number("VK_HEADER_VERSION")

    def number(self, name: str) -> str:
        """The value of a ``#define``."""
        found = re.search(rf"#define {name}\s+(\d+)U?\b", self.text)
        assert found is not None, name
        return found.group(1)


class Declarations:
    """Collects declarations in an order that C accepts."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.lines: list[str] = []
        self._seen: set[str] = set()

    def need(self, name: str) -> None:
        """Declare the type ``name``, after the types it is made of, unless it was declared."""
        if name in self._seen or not name.startswith(("Vk", "PFN_")):
            return
        self._seen.add(name)
        self.lines.append(self._type(name))

    def _type(self, name: str) -> str:
        header = self.header
        if name in header.structures:
            body = re.sub(r"\bVK_[A-Z]\w+", lambda m: header.number(m[0]), header.structures[name])
            for other in re.findall(r"\b(?:Vk|PFN_)\w+", body):
                self.need(other)
            return body
        if name in header.aliases:
            self.need(header.aliases[name])
            return f"typedef {header.aliases[name]} {name};"
        if name in header.enumerations:
            return f"typedef int32_t {name};"
        if name in header.handles:
            return f"typedef struct {name}_T *{name};"
        if name.startswith("PFN_"):
            return f"typedef void (*{name})(void);"
        return f"typedef {'uint64_t' if name in LONG_WORDS else 'uint32_t'} {name};"


def declarations(header: Header) -> str:
    """The C declarations; every value of an enumeration is a ``#define``."""
    made = Declarations(header)
    for name in FUNCTIONS:
        for other in re.findall(r"\b(?:Vk|PFN_)\w+", " ".join(header.functions[name])):
            made.need(other)
    for name in STRUCTURES:
        made.need(name)
    values = [line for name in ENUMERATIONS for line in _values(header.enumerations[name])]
    functions = [
        f"{result} vk{name}({arguments});"
        for name, (result, arguments) in ((name, header.functions[name]) for name in FUNCTIONS)
    ]
    types = [*_structure_types(header, made.lines)]
    preamble = PREAMBLE.format(version=header.version)
    return preamble + "\n".join([*values, *types, *made.lines, *functions]) + "\n"


def _values(body: str) -> list[str]:
    """``#define`` lines of the values, without synonyms and without the maximum that pads the
    type."""
    pairs = re.findall(r"(VK_\w+) = (-?\w+)", body)
    return [
        f"#define {name} {value}"
        for name, value in pairs
        if not value.startswith("VK_") and not name.endswith("_MAX_ENUM")
    ]


def _structure_types(header: Header, lines: list[str]) -> list[str]:
    """``#define`` lines of the ``sType`` of every structure among ``lines`` that has one."""
    known = re.findall(r"VK_STRUCTURE_TYPE_(\w+) = (\d+)", header.enumerations["VkStructureType"])
    by_name = {name.replace("_", ""): value for name, value in known}
    found = []
    for line in lines:
        named = re.match(r"typedef struct (Vk\w+) \{\s*VkStructureType", line)
        if named is not None and (value := by_name.get(named[1][2:].upper())) is not None:
            found.append(f"#define STRUCTURE_TYPE_{named[1]} {value}")
    return found


def bindings() -> str:
    """The text of the module whose ``ffi`` has the declarations of the headers in this folder."""
    ffi = cffi.FFI()
    for header in HEADERS:
        ffi.cdef((FOLDER / header).read_text("utf-8"))
    ffi.set_source("accel.vulkan.bindings", None)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, BINDINGS)
        ffi.emit_python_code(str(made))
        return made.read_text("utf-8")


def main(path: str) -> None:
    """Write ``declarations.h`` and ``bindings.py`` to this folder."""
    (FOLDER / HEADERS[0]).write_text(declarations(Header(Path(path).read_text())), "utf-8")
    (FOLDER / BINDINGS).write_text(bindings(), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
