"""Kernels of the package in the GPU's memory, loaded at their first use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from accel.amd.device import Allocation, Device
from accel.amd.kernel_files import file_name, folder_of
from accel.kernels.compiled import has_compiled, read_compiled
from accel.kernels.source import Module
from contract.errors import CodecError, TierUnavailable
from contract.kernel import GpuTarget, KernelHeader, decode_kernel

CODE_END = 0xBF9F0000
"""S_CODE_END, with which a loader pads code because the GPU fetches instructions ahead."""
PADDING_BYTES = 256
"""Padding after the code, because the GPU fetches instructions ahead."""


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel at an address of the GPU."""

    header: KernelHeader
    allocation: Allocation


@dataclass(slots=True)
class Modules:
    """The modules of one device; ``native`` says whether it divides and takes roots itself."""

    device: Device
    native: bool = True
    _loaded: dict[str, LoadedKernel] = field(default_factory=dict)

    def kernel(self, module: Module, native: bool | None = None) -> LoadedKernel:
        """The kernel of a module, loaded if necessary. Raises TierUnavailable for a damaged
        package, and OutOfMemory."""
        own = self.native if native is None else native
        name = file_name(module, own)
        folder = folder_of(self.device.generation)
        if name not in self._loaded:
            try:
                if not has_compiled(folder, name):
                    # Only modules that divide have another one.
                    name = file_name(module, True)
                if name in self._loaded:
                    return self._loaded[name]
                data = read_compiled(folder, name)
                header = checked(decode_kernel(data), self.device.generation.target)
            except (OSError, CodecError) as error:
                reason = f"the kernel {name} of this installation: {error}"
                raise TierUnavailable(self.device.tier, reason, "install zinc-rt again") from None
            self._loaded[name] = self.load(header)
        return self._loaded[name]

    def kernels(self, modules: Iterable[Module]) -> dict[Module, LoadedKernel]:
        """The kernels of modules. Raises TierUnavailable and OutOfMemory."""
        return {module: self.kernel(module) for module in dict.fromkeys(modules)}

    def load(self, header: KernelHeader) -> LoadedKernel:
        """A kernel file's code in the GPU's memory. Raises OutOfMemory."""
        nbytes = len(header.code) + PADDING_BYTES
        allocation = self.device.allocate(f"kernel {header.name}", nbytes)
        allocation.host[: len(header.code)] = np.frombuffer(header.code, np.uint8)
        allocation.host[len(header.code) :].view(np.uint32)[:] = CODE_END
        requested = header.rsrc1 | self.device.driver.rsrc1
        return LoadedKernel(replace(header, rsrc1=requested), allocation)

    def close(self) -> None:
        """Free all kernels."""
        for loaded in self._loaded.values():
            self.device.free(loaded.allocation)
        self._loaded.clear()


def checked(header: KernelHeader, target: GpuTarget) -> KernelHeader:
    """Raises CodecError for a kernel that a launch could not run."""
    if header.target is not target:
        named = f"target {header.target.name}, not {target.name}"
        raise CodecError(f"kernel {header.name}: {named}")
    if header.scratch_bytes:
        raise CodecError(f"kernel {header.name}: {header.scratch_bytes} bytes of scratch memory")
    if header.subgroup_size != 32:
        raise CodecError(f"kernel {header.name}: waves of {header.subgroup_size}, not 32")
    return header
