"""The kernels of one device: modules of SPIR-V that the driver compiles at their first use."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from accel.intel.api import LevelZeroError
from accel.intel.compiler import Compiler
from accel.intel.queue import Queue
from accel.kernels.launches import KernelCache
from accel.kernels.source import Language, Module, Traits, module_source
from accel.packets.build import BuildError


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel that is ready to be launched in groups of ``items`` items."""

    handle: Any
    items: int


class Program(KernelCache[LoadedKernel]):
    """See KernelCache."""

    def __init__(self, queue: Queue, compiler: Compiler, traits: Traits) -> None:
        super().__init__(traits)
        self.queue = queue
        self._compiler = compiler
        self._undo = ExitStack()

    def build(self, name: str, code: bytes, entry: str, items: int) -> LoadedKernel:
        """The kernel ``entry`` of a module of SPIR-V. Raises BuildError with the driver's log."""
        zero, queue = self.queue.zero, self.queue
        data = zero.ffi.from_buffer("uint8_t[]", code)
        description = zero.structure(
            "module_desc",
            format=zero.constant("MODULE_FORMAT_IL_SPIRV"),
            inputSize=len(code),
            pInputModule=data,
        )
        module, log = (
            zero.ffi.new("ze_module_handle_t *"),
            zero.ffi.new("ze_module_build_log_handle_t *"),
        )
        try:
            zero.call("ModuleCreate", queue.context, queue.device.handle, description, module, log)
        except LevelZeroError as error:
            text = self._text_of(log[0])
            if "MODULE" not in error.meaning:
                raise
            raise BuildError(queue.device.name, name, f"{error}: {text}") from None
        self._text_of(log[0])
        self._undo.callback(zero.call, "ModuleDestroy", module[0])
        named = zero.structure("kernel_desc", pKernelName=zero.ffi.new("char[]", entry.encode()))
        handle = zero.create("KernelCreate", "kernel", module[0], named)
        self._undo.callback(zero.call, "KernelDestroy", handle)
        zero.call("KernelSetGroupSize", handle, items, 1, 1)
        # Packets hold addresses, of which the driver knows nothing.
        flags = ("DEVICE", "HOST")
        access = sum(zero.constant(f"KERNEL_INDIRECT_ACCESS_FLAG_{flag}") for flag in flags)
        zero.call("KernelSetIndirectAccess", handle, access)
        return LoadedKernel(handle, items)

    def close(self) -> None:
        """Destroy everything; nothing submitted may use it."""
        self._kernels.clear()
        self._undo.close()

    def _build_kernel(self, module: Module, traits: Traits) -> LoadedKernel:
        text = module_source(Language.INTEL, module, traits)
        code = self._compiler.compiled(str(module), text)
        return self.build(str(module), code, module.entry, module.group_size)

    def _text_of(self, log: Any) -> str:
        """The text of a build log, which is destroyed; empty if there is none."""
        zero = self.queue.zero
        if log == zero.ffi.NULL:
            return ""
        size = zero.ffi.new("size_t *")
        zero.call("ModuleBuildLogGetString", log, size, zero.ffi.NULL)
        text = zero.ffi.new("char[]", max(1, int(size[0])))
        zero.call("ModuleBuildLogGetString", log, size, text)
        zero.call("ModuleBuildLogDestroy", log)
        return bytes(zero.ffi.string(text)).decode(errors="replace").strip()
