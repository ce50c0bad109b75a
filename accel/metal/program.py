"""Metal compiles the texts of the kernels to pipelines on the user's machine.

macOS caches what it compiled, so there is no cache of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.kernels.launches import KernelCache
from accel.kernels.source import Language, Module, Traits, module_source
from accel.metal.objc import MetalError
from accel.metal.queue import Queue
from accel.packets.build import BuildError
from contract.errors import TierError

LANGUAGE_VERSION = 3 << 16
"""MTLLanguageVersion3_0."""
SAFE, PRECISE = 0, 1
"""MTLMathModeSafe, MTLMathFloatingPointFunctionsPrecise."""
SETTINGS_METHODS = ("setLanguageVersion:",)
MATH_MODE = ("setMathMode:", "setMathFloatingPointFunctions:")
FAST_MATH = "setFastMathEnabled:"
DESCRIPTOR_METHODS = (
    *("setComputeFunction:", "setMaxTotalThreadsPerThreadgroup:"),
    "setSupportIndirectCommandBuffers:",
)
LIBRARY_METHODS = ("newFunctionWithName:",)
PIPELINE_METHODS = ("maxTotalThreadsPerThreadgroup",)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A kernel that is ready to be dispatched in groups of ``items`` items."""

    handle: Any
    items: int


class Program(KernelCache[Pipeline]):
    """See KernelCache."""

    def __init__(self, queue: Queue, traits: Traits) -> None:
        super().__init__(traits)
        self.queue = queue

    def build(self, name: str, text: str, entry: str, items: int) -> Pipeline:
        """The pipeline of kernel ``entry`` of a text. Raises BuildError with the compiler's
        message, and MetalError when the device cannot run groups of ``items`` items."""
        objc, device = self.queue.objc, self.queue.device
        with objc.pool(), objc.owned(self._settings()) as settings:
            try:
                library = objc.tried(
                    name,
                    device.handle,
                    "newLibraryWithSource:options:error:",
                    objc.string(text),
                    settings,
                )
            except MetalError as error:
                raise BuildError(device.name, name, error.said) from None
            with objc.owned(library):
                objc.check(library, LIBRARY_METHODS)
                purpose = f"the kernel {entry} of {name}"
                selector = "newFunctionWithName:"
                function = objc.create(purpose, library, selector, objc.string(entry))
            with objc.owned(function):
                return self._pipeline(name, function, items)

    def discard(self, pipeline: Pipeline) -> None:
        """Release a pipeline from ``build``."""
        self.queue.objc.release(pipeline.handle)

    def close(self) -> None:
        """Release everything."""
        for pipeline in self._kernels.values():
            self.discard(pipeline)
        self._kernels.clear()

    def _build_kernel(self, module: Module, traits: Traits) -> Pipeline:
        text = module_source(Language.METAL, module, traits)
        return self.build(str(module), text, module.entry, module.group_size)

    def _settings(self) -> Any:
        """Compiler settings under which every operation is computed as written."""
        objc = self.queue.objc
        settings = objc.new("MTLCompileOptions")
        try:
            objc.check(settings, SETTINGS_METHODS)
            objc.send(settings, "setLanguageVersion:", LANGUAGE_VERSION)
            if objc.responds(settings, MATH_MODE[0]):
                objc.check(settings, MATH_MODE)
                objc.send(settings, MATH_MODE[0], SAFE)
                objc.send(settings, MATH_MODE[1], PRECISE)
            else:
                # Before macOS 15.
                objc.check(settings, (FAST_MATH,))
                objc.send(settings, FAST_MATH, False)
        except BaseException:
            objc.release(settings)
            raise
        return settings

    def _pipeline(self, name: str, function: Any, items: int) -> Pipeline:
        objc, device = self.queue.objc, self.queue.device
        with objc.owned(objc.new("MTLComputePipelineDescriptor")) as descriptor:
            objc.check(descriptor, DESCRIPTOR_METHODS)
            objc.send(descriptor, "setComputeFunction:", function)
            # With this limit the compiler gives each item as many registers as such groups have.
            objc.send(descriptor, "setMaxTotalThreadsPerThreadgroup:", items)
            objc.send(descriptor, "setSupportIndirectCommandBuffers:", True)
            handle = objc.tried(
                f"the pipeline of {name}",
                device.handle,
                "newComputePipelineStateWithDescriptor:options:reflection:error:",
                descriptor,
                0,
                objc.ffi.NULL,
            )
        try:
            objc.check(handle, PIPELINE_METHODS)
            limit = int(objc.send(handle, "maxTotalThreadsPerThreadgroup"))
            if limit < items:
                raise TierError(
                    f"{device.name}: groups of {name} have {items} items, it takes {limit}"
                )
        except BaseException:
            objc.release(handle)
            raise
        return Pipeline(handle, items)
