"""libvulkan through cffi: structures by name, and errors raised as exceptions."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from contract.errors import TierUnavailable
from contract.extras import install_command

TIER = "vulkan"
LIBRARIES = ("libvulkan.so.1", "libvulkan.so", "vulkan-1.dll", "libvulkan.1.dylib")
LOADER_HINT = "apt install libvulkan1, or install the graphics card's driver"


class VulkanError(Exception):
    """A function of libvulkan returned the error ``result``."""

    def __init__(self, function: str, result: int, meaning: str) -> None:
        self.function = function
        self.result = result
        super().__init__(f"{function} gave {meaning}")


class Vulkan:
    """The functions of one loaded library, and constructors of C values.

    ``library`` is where the declared functions are looked up."""

    def __init__(self, ffi: Any, library: Any) -> None:
        self.ffi = ffi
        self.library = library
        self._referenced: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()

    def call(self, name: str, *arguments: Any) -> int:
        """Call ``vk<name>``. Raises VulkanError for a negative result; other results, such as
        VK_TIMEOUT, are returned."""
        result: int = getattr(self.library, f"vk{name}")(*arguments)
        if result < 0:
            raise VulkanError(f"vk{name}", result, self._meaning(result))
        return result

    def run(self, name: str, *arguments: Any) -> Any:
        """Call ``vk<name>``, which returns no VkResult."""
        return getattr(self.library, f"vk{name}")(*arguments)

    def constant(self, name: str) -> int:
        """The value of the constant ``VK_<name>``."""
        return int(getattr(self.library, f"VK_{name}"))

    def flags(self, prefix: str, *names: str) -> int:
        """The bits ``VK_<prefix>_<name>_BIT``, combined."""
        return sum(self.constant(f"{prefix}_{name}_BIT") for name in names)

    def structure(self, kind: str, **fields: Any) -> Any:
        """A pointer to a new ``Vk<kind>`` with its sType set.

        It keeps alive what ``fields`` point to."""
        made = self.ffi.new(f"Vk{kind} *")
        kind_number = getattr(self.library, f"STRUCTURE_TYPE_Vk{kind}", None)
        if kind_number is not None:
            made.sType = kind_number
        for name, value in fields.items():
            setattr(made, name, value)
        self._referenced[made] = tuple(fields.values())
        return made

    def array(self, kind: str, values: Any) -> Any:
        """A C array of ``kind`` with the given ``values``, a sequence or a number of zeros."""
        made = self.ffi.new(f"{kind}[]", values)
        if not isinstance(values, int):
            self._referenced[made] = tuple(values)
        return made

    def text(self, value: str) -> Any:
        """A C string."""
        return self.ffi.new("char[]", value.encode())

    def create(self, name: str, parent: Any, information: Any) -> Any:
        """The handle that ``vkCreate<name>`` or ``vkAllocate<name>`` makes from ``information``."""
        function, kind = {"Memory": ("AllocateMemory", "DeviceMemory")}.get(
            name, (f"Create{name}", name)
        )
        handle = self.ffi.new(f"Vk{kind} *")
        arguments = (information, self.ffi.NULL, handle)
        self.call(function, *(arguments if parent is None else (parent, *arguments)))
        return handle[0]

    def list_all(self, name: str, kind: str, *arguments: Any) -> Any:
        """A C array of everything that ``vk<name>`` counts and then lists; it may be empty."""
        count = self.ffi.new("uint32_t *")
        function = getattr(self.library, f"vk{name}")
        for destination in (self.ffi.NULL, None):
            if destination is None:
                destination = self.array(f"Vk{kind}", count[0])
            result = function(*arguments, count, destination)
            if result is not None and result < 0:
                raise VulkanError(f"vk{name}", result, self._meaning(result))
        return self.ffi.unpack(destination, count[0]) if count[0] else []

    def _meaning(self, result: int) -> str:
        for name in ERRORS:
            if getattr(self.library, f"VK_{name}") == result:
                return f"VK_{name}"
        return f"VkResult {result}"


ERRORS = (
    "ERROR_OUT_OF_HOST_MEMORY",
    "ERROR_OUT_OF_DEVICE_MEMORY",
    "ERROR_INITIALIZATION_FAILED",
    "ERROR_DEVICE_LOST",
    "ERROR_MEMORY_MAP_FAILED",
    "ERROR_LAYER_NOT_PRESENT",
    "ERROR_EXTENSION_NOT_PRESENT",
    "ERROR_FEATURE_NOT_PRESENT",
    "ERROR_INCOMPATIBLE_DRIVER",
    "ERROR_TOO_MANY_OBJECTS",
    "ERROR_FRAGMENTED_POOL",
    "ERROR_INVALID_OPAQUE_CAPTURE_ADDRESS",
    "ERROR_UNKNOWN",
)
OUT_OF_MEMORY = (
    *("ERROR_OUT_OF_HOST_MEMORY", "ERROR_OUT_OF_DEVICE_MEMORY", "ERROR_MEMORY_MAP_FAILED"),
    *("ERROR_TOO_MANY_OBJECTS", "ERROR_FRAGMENTED_POOL"),
)
"""Errors which mean that memory or handles ran out."""


def _declared() -> Any:
    try:
        from accel.vulkan.bindings import ffi
    except ImportError as error:
        raise TierUnavailable(
            TIER, f"cffi cannot be imported ({error})", install_command("vulkan")
        ) from None
    return ffi


def load_vulkan(libraries: tuple[str, ...] = LIBRARIES) -> Vulkan:
    """The first of ``libraries`` that exists on this machine. Raises TierUnavailable if cffi or
    the library is missing."""
    ffi = _declared()
    for name in libraries:
        try:
            return Vulkan(ffi, ffi.dlopen(name))
        except OSError:
            continue
    raise TierUnavailable(TIER, "there is no Vulkan loader (libvulkan)", LOADER_HINT)


def is_out_of_memory(vulkan: Vulkan, error: VulkanError) -> bool:
    """Whether ``error`` says that memory or handles ran out."""
    return any(error.result == vulkan.constant(name) for name in OUT_OF_MEMORY)
