"""The compiled modules of the package, and the pipelines that a driver makes of them."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from accel.kernels.accessors import MAX_PUSHED_BYTES
from accel.kernels.compiled import read_compiled
from accel.kernels.launches import KernelCache
from accel.kernels.source import MATRIX_OPS, PLANE_PRODUCT, Module, Traits
from accel.packets.disk_cache import read_entry, write_entry
from accel.vulkan.build import FOLDER, file_name
from accel.vulkan.device import CacheKey, Device
from accel.vulkan.queue import Queue
from accel.vulkan.spirv import with_float_controls
from contract.errors import TierError
from contract.kernel import KernelHeader, decode_kernel

MAGIC = b"zinc-rt vulkan pipelines 1\n"
CACHE_HEADER = struct.Struct("<4I16s")
"""Size, version, vendor, device and UUID (VkPipelineCacheHeaderVersionOne)."""
CACHE_VERSION = 1


@functools.cache
def kernel_of(name: str) -> KernelHeader:
    """The module of the package with this name. Raises FileNotFoundError when there is none."""
    return decode_kernel(read_compiled(FOLDER, name))


def cache_file(folder: Path, device: Device) -> Path:
    """The file with the cached pipelines of one device and driver."""
    identity = repr((device.name, device.driver, device.version, astuple(device.cache_key)))
    return folder / f"{hashlib.sha256(identity.encode()).hexdigest()}.pipelines"


def fitting_cache(data: bytes | None, key: CacheKey) -> bytes:
    """``data`` if its header is that of this driver, else empty, since drivers need not check
    it."""
    if data is None or len(data) < CACHE_HEADER.size:
        return b""
    size, version, vendor, device, uuid = CACHE_HEADER.unpack_from(data)
    fits = (vendor, device, uuid) == (key.vendor, key.device, key.uuid)
    right = size >= CACHE_HEADER.size and version == CACHE_VERSION
    return data if fits and right else b""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A kernel that is ready to be dispatched."""

    handle: Any
    header: KernelHeader


class Program(KernelCache[Pipeline]):
    """See KernelCache.

    ``cache`` is the folder of cached pipelines, None for no cache on disk."""

    def __init__(self, queue: Queue, traits: Traits, cache: Path | None = None) -> None:
        super().__init__(traits)
        self.queue = queue
        self._file = cache_file(cache, queue.device) if cache is not None else None
        vulkan = queue.vulkan
        stored = read_entry(self._file, MAGIC) if self._file is not None else None
        self._cache = self._new_cache(fitting_cache(stored, queue.device.cache_key))
        pushed = vulkan.structure(
            "PushConstantRange",
            stageFlags=vulkan.flags("SHADER_STAGE", "COMPUTE"),
            offset=0,
            size=MAX_PUSHED_BYTES,
        )
        layout = vulkan.structure(
            "PipelineLayoutCreateInfo", pushConstantRangeCount=1, pPushConstantRanges=pushed
        )
        self.layout = vulkan.create("PipelineLayout", queue.handle, layout)

    def kernels(self, modules: Iterable[Module]) -> dict[Module, Pipeline]:
        """The kernels of ``modules``; new ones are saved to disk."""
        before = len(self._kernels)
        found = super().kernels(modules)
        if len(self._kernels) > before:
            self._save()
        return found

    def build(self, header: KernelHeader, traits: Traits) -> Pipeline:
        """A pipeline of a module. Raises VulkanError when the driver rejects it."""
        queue, vulkan = self.queue, self.queue.vulkan
        _check_limits(header, queue.device)
        code = with_float_controls(header.code, queue.device.controls)
        words = vulkan.ffi.from_buffer("uint32_t[]", bytearray(code))
        information = vulkan.structure("ShaderModuleCreateInfo", codeSize=len(code), pCode=words)
        module = vulkan.create("ShaderModule", queue.handle, information)
        try:
            return Pipeline(self._pipeline(module, traits), header)
        finally:
            vulkan.run("DestroyShaderModule", queue.handle, module, vulkan.ffi.NULL)

    def discard(self, pipeline: Pipeline) -> None:
        """Destroy a pipeline from ``build``."""
        vulkan = self.queue.vulkan
        vulkan.run("DestroyPipeline", self.queue.handle, pipeline.handle, vulkan.ffi.NULL)

    def close(self) -> None:
        """Destroy everything; the device must be idle."""
        vulkan, device, null = self.queue.vulkan, self.queue.handle, self.queue.vulkan.ffi.NULL
        for pipeline in self._kernels.values():
            self.discard(pipeline)
        self._kernels.clear()
        vulkan.run("DestroyPipelineLayout", device, self.layout, null)
        vulkan.run("DestroyPipelineCache", device, self._cache, null)

    def _build_kernel(self, module: Module, traits: Traits) -> Pipeline:
        return self.build(_kernel(module, traits), traits)

    def _pipeline(self, module: Any, traits: Traits) -> Any:
        vulkan = self.queue.vulkan
        chosen = [traits.divide, traits.root, traits.half]
        entries = [{"constantID": i, "offset": 4 * i, "size": 4} for i in range(len(chosen))]
        values = vulkan.array("uint32_t", [int(value) for value in chosen])
        constants = vulkan.structure(
            "SpecializationInfo",
            mapEntryCount=len(chosen),
            pMapEntries=vulkan.array("VkSpecializationMapEntry", entries),
            dataSize=4 * len(chosen),
            pData=values,
        )
        stage = vulkan.structure(
            "PipelineShaderStageCreateInfo",
            stage=vulkan.flags("SHADER_STAGE", "COMPUTE"),
            module=module,
            pName=vulkan.text("main"),
            pSpecializationInfo=constants,
        )
        information = vulkan.structure(
            "ComputePipelineCreateInfo", stage=stage[0], layout=self.layout
        )
        handle = vulkan.ffi.new("VkPipeline *")
        vulkan.call(
            "CreateComputePipelines",
            self.queue.handle,
            self._cache,
            1,
            information,
            vulkan.ffi.NULL,
            handle,
        )
        return handle[0]

    def _new_cache(self, data: bytes) -> Any:
        vulkan = self.queue.vulkan
        held = vulkan.ffi.from_buffer(bytearray(data))
        information = vulkan.structure(
            "PipelineCacheCreateInfo", initialDataSize=len(data), pInitialData=held
        )
        return vulkan.create("PipelineCache", self.queue.handle, information)

    def _save(self) -> None:
        if self._file is None:
            return
        vulkan = self.queue.vulkan
        size = vulkan.ffi.new("size_t *")
        arguments = self.queue.handle, self._cache, size
        vulkan.call("GetPipelineCacheData", *arguments, vulkan.ffi.NULL)
        data = vulkan.ffi.new("char[]", int(size[0]))
        vulkan.call("GetPipelineCacheData", *arguments, data)
        write_entry(self._file, MAGIC, bytes(vulkan.ffi.buffer(data, int(size[0]))))


def _kernel(module: Module, traits: Traits) -> KernelHeader:
    """The variant of a module for matrix units, or with packed dot products if ``traits`` and the
    kernel have them."""
    if module.op in (*MATRIX_OPS, PLANE_PRODUCT):
        return kernel_of(file_name(module, matrix=True))
    if traits.dot:
        try:
            return kernel_of(file_name(module, dot=True))
        except FileNotFoundError:
            pass
    return kernel_of(file_name(module))


def _check_limits(header: KernelHeader, device: Device) -> None:
    if header.lds_bytes > device.group_memory_bytes:
        raise TierError(
            f"{device.name}: {header.name} needs {header.lds_bytes} bytes of group memory, "
            f"a group has {device.group_memory_bytes}"
        )
