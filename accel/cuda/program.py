"""Kernels compiled by NVRTC, and cubins kept on disk.

A tuned kernel registers in ``accel/cuda/tuned.py``: its docstring says how, with what parameters it
is called, and how it gets a weight layout of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from accel.cuda.device import TIER, Device
from accel.cuda.driver import EXTRA_HINT, Context, CudaError
from accel.packets.build import (
    BuildError,
    Progress,
    cache_entry,
    read_binary,
    source_of,
    write_binary,
)
from contract.errors import TierUnavailable

MAGIC = b"zinc-rt cuda program 1\n"
OPTIONS = ("--std=c++17", "--fmad=false")
"""A product and a sum round separately; division and roots are correctly rounded by default."""


class Compiler:
    """NVRTC: CUDA C++ without any header becomes machine code of one architecture."""

    def __init__(self, nvrtc: Any = None) -> None:
        self._nvrtc = import_nvrtc() if nvrtc is None else nvrtc
        try:
            _, major, minor = self._nvrtc.nvrtcVersion()
        except RuntimeError as error:
            reason = f"there is no NVRTC ({str(error).splitlines()[0]})"
            raise TierUnavailable(TIER, reason, EXTRA_HINT) from None
        self.version = f"{major}.{minor}"

    def compile(
        self, name: str, files: Mapping[str, str], architecture: str, options: tuple[str, ...]
    ) -> bytes:
        """The cubin of one translation unit. Raises BuildError with the compiler's log."""
        nvrtc = self._nvrtc
        source = source_of(files).encode()
        program = self._made(nvrtc.nvrtcCreateProgram(source, f"{name}.cu".encode(), 0, [], []))
        try:
            words = [word.encode() for word in (f"--gpu-architecture={architecture}", *options)]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                log = self._text(program, "ProgramLog")
                raise BuildError(architecture, _blamed_file(log, files) or name, log)
            return self._bytes(program, "CUBIN")
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _made(self, answer: tuple[Any, ...]) -> Any:
        status, value = answer
        if status != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BuildError(TIER, "the kernels", f"NVRTC {self.version} answered {status.name}")
        return value

    def _bytes(self, program: Any, what: str) -> bytes:
        data: bytes = b" " * self._made(getattr(self._nvrtc, f"nvrtcGet{what}Size")(program))
        getattr(self._nvrtc, f"nvrtcGet{what}")(program, data)
        return data

    def _text(self, program: Any, what: str) -> str:
        return self._bytes(program, what).rstrip(b"\0").decode(errors="replace")


def import_nvrtc() -> ModuleType:
    """``cuda.bindings.nvrtc``; TierUnavailable naming the extra when it cannot be imported."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise TierUnavailable(TIER, f"cuda-bindings is missing ({error})", EXTRA_HINT) from None
    module: ModuleType = nvrtc
    return module


@dataclass(slots=True)
class Builder:
    """Cubins of one architecture, from the cache when it holds one for exactly the request."""

    compiler: Compiler
    architecture: str
    cache: Path | None = None
    progress: Progress | None = None

    def cubin(
        self, name: str, files: Mapping[str, str], macros: Mapping[str, int], fresh: bool = False
    ) -> bytes:
        """The machine code of ``files``; ``fresh`` ignores what the cache has. Raises BuildError.

        Several threads may ask at once.
        """
        options = (*OPTIONS, *(f"-D{macro}={value}" for macro, value in sorted(macros.items())))
        identity = (*options, self.compiler.version, self.architecture, source_of(files))
        entry = cache_entry(self.cache, identity)
        if not fresh and (binary := read_binary(entry, MAGIC)) is not None:
            return binary
        if self.progress is not None:
            self.progress(f"compiling CUDA kernels of {name} for {self.architecture}")
        binary = self.compiler.compile(name, files, self.architecture, options)
        write_binary(entry, MAGIC, binary)
        return binary


@dataclass(slots=True)
class Modules:
    """Modules loaded into one context, by file and macros."""

    context: Context
    device: Device
    builder: Builder
    _loaded: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = field(default_factory=dict)

    def function(
        self,
        name: str,
        files: Mapping[str, str],
        entry: str,
        macros: Mapping[str, int] | None = None,
    ) -> Any:
        """Kernel ``entry`` of module ``name``, built and loaded on first use.

        Raises BuildError when it does not compile or has no such kernel.
        """
        macros = macros or {}
        key = (name, tuple(sorted(macros.items())))
        if key not in self._loaded:
            self._loaded[key] = self._load(name, files, macros)
        try:
            return self.context.call("cuModuleGetFunction", self._loaded[key], entry.encode())
        except CudaError:
            raise BuildError(self.device.name, name, f"it has no kernel {entry}") from None

    def _load(self, name: str, files: Mapping[str, str], macros: Mapping[str, int]) -> Any:
        cubin = self.builder.cubin(name, files, macros)
        try:
            return self.context.call("cuModuleLoadData", cubin)
        except CudaError:
            # An entry that a compiler made may still be one this driver does not take.
            cubin = self.builder.cubin(name, files, macros, fresh=True)
        try:
            return self.context.call("cuModuleLoadData", cubin)
        except CudaError as error:
            raise BuildError(self.device.name, name, str(error)) from None


def _blamed_file(log: str, files: Mapping[str, str]) -> str | None:
    """The kernel file the first error of ``log`` is in."""
    found = re.search(r"([\w.]+)\(\d+\): (?:catastrophic )?error", log)
    return found.group(1) if found and found.group(1) in files else None
