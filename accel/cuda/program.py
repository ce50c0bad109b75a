"""Compiles kernels with NVRTC, and caches cubins on disk.

A tuned kernel registers in ``accel/cuda/tuned.py``: its docstring says how, with what parameters it
is called, and how it gets a weight layout of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from accel.cuda.device import Device
from accel.cuda.driver import TIER, Context, CudaError
from accel.kernels.source import INCLUDE, Language, Module, Traits, headers, module_source
from accel.packets.build import BuildError, Progress, cache_entry
from accel.packets.disk_cache import read_entry, write_entry
from contract.errors import TierUnavailable
from contract.extras import install_command
from contract.processors import processors

MAGIC = b"zinc-rt cuda program 1\n"
NOT_FOUND = "CUDA_ERROR_NOT_FOUND"
REFUSED = ("CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_SOURCE")
"""The driver's errors for machine code that it cannot run."""
TRAITS = Traits(dot=True)
OPTIONS = ("--std=c++17", "--fmad=false")
"""No fused multiply-add: products and sums round separately. Division and roots are correctly
rounded by default."""


class Compiler:
    """NVRTC: compiles CUDA C++ without any header to machine code of one architecture."""

    def __init__(self, nvrtc: Any = None) -> None:
        self._nvrtc = import_nvrtc() if nvrtc is None else nvrtc
        try:
            _, major, minor = self._nvrtc.nvrtcVersion()
        except RuntimeError as error:
            reason = f"there is no NVRTC ({str(error).splitlines()[0]})"
            raise TierUnavailable(TIER, reason, install_command("cuda")) from None
        self.version = f"{major}.{minor}"

    def compile(self, name: str, text: str, architecture: str, options: tuple[str, ...]) -> bytes:
        """The cubin of one translation unit. Raises BuildError with the compiler's log."""
        nvrtc = self._nvrtc
        program = self._checked(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
        try:
            words = [word.encode() for word in (f"--gpu-architecture={architecture}", *options)]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                log = self._text(program, "ProgramLog")
                raise BuildError(architecture, name, log)
            return self._bytes(program, "CUBIN")
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _checked(self, answer: tuple[Any, ...]) -> Any:
        status, value = answer
        if status != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise BuildError(TIER, "the kernels", f"NVRTC {self.version} answered {status.name}")
        return value

    def _bytes(self, program: Any, output: str) -> bytes:
        # NVRTC writes here: never bytes, of which Python has each of length one only once.
        data = bytearray(self._checked(getattr(self._nvrtc, f"nvrtcGet{output}Size")(program)))
        getattr(self._nvrtc, f"nvrtcGet{output}")(program, data)
        return bytes(data)

    def _text(self, program: Any, output: str) -> str:
        return self._bytes(program, output).rstrip(b"\0").decode(errors="replace")


def import_nvrtc() -> ModuleType:
    """``cuda.bindings.nvrtc``; TierUnavailable naming the extra when it cannot be imported."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise TierUnavailable(
            TIER, f"cuda-bindings is missing ({error})", install_command("cuda")
        ) from None
    module: ModuleType = nvrtc
    return module


@dataclass(frozen=True, slots=True)
class Source:
    """One translation unit. ``name`` is used in errors, ``macros`` are defined before the text."""

    name: str
    text: str
    macros: tuple[tuple[str, int], ...] = ()


@cache
def plain_source(module: Module) -> Source:
    """A kernel of ``accel/kernels``. Raises BuildError when the op has none."""
    try:
        text = module_source(Language.CUDA, module, TRAITS)
    except FileNotFoundError:
        problem = "accel/packets/ops.py names an op whose kernel file does not exist"
        raise BuildError(TIER, f"{module.op}.k", problem) from None
    return Source(str(module), text)


def tuned_source(file: str, macros: Mapping[str, int], op: str = "") -> Source:
    """A kernel of ``accel/cuda/kernels`` with the files it includes, see ``accel.cuda.tuned``."""
    return Source(file, _tuned_text(file, op), tuple(sorted(macros.items())))


@cache
def _tuned_text(file: str, op: str) -> str:
    return headers(Language.CUDA, op, TRAITS) + _included(file, set())


def _included(name: str, seen: set[str]) -> str:
    """A file of ``accel/cuda/kernels`` with the files it includes, each once."""
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    folder = "accel" if name.endswith(".k") else "accel.cuda"
    own = resources.files(folder).joinpath("kernels", name).read_text(encoding="utf-8")
    for number, line in enumerate(own.splitlines(), 1):
        if (include := INCLUDE.fullmatch(line.strip())) is None:
            lines.append(line)
        elif include[1] not in seen:
            lines += [_included(include[1], seen), f'#line {number + 1} "{name}"']
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class Builder:
    """Compiles cubins of one architecture, or takes them from the cache."""

    compiler: Compiler
    architecture: str
    cache: Path | None = None
    progress: Progress | None = None
    _announced: bool = False

    def cubin(self, source: Source, fresh: bool = False) -> bytes:
        """The machine code of ``source``; ``fresh`` ignores the cache. Raises BuildError.

        Several threads may call this at once."""
        macros = (f"-D{macro}={value}" for macro, value in source.macros)
        options = (*OPTIONS, *macros)
        identity = (*options, self.compiler.version, self.architecture, source.text)
        entry = cache_entry(self.cache, identity)
        if entry is not None and not fresh and (binary := read_entry(entry, MAGIC)) is not None:
            return binary
        if self.progress is not None and not self._announced:
            self._announced = True
            self.progress(f"compiling CUDA kernels for {self.architecture}")
        binary = self.compiler.compile(source.name, source.text, self.architecture, options)
        if entry is not None:
            write_entry(entry, MAGIC, binary)
        return binary


@dataclass(slots=True)
class Modules:
    """Modules loaded into one context. One thread uses this object; other threads compile."""

    context: Context
    device: Device
    builder: Builder
    _loaded: dict[Source, Any] = field(default_factory=dict)
    _coming: dict[Source, Future[bytes]] = field(default_factory=dict)
    _threads: ThreadPoolExecutor | None = None

    def build_ahead(self, sources: Iterable[Source]) -> None:
        """Start compiling sources that are not loaded yet, and return at once."""
        for source in dict.fromkeys(sources):
            if source not in self._loaded and source not in self._coming:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(processors(), "build")
                self._coming[source] = self._threads.submit(self.builder.cubin, source)

    def prepare(self, sources: Iterable[Source]) -> None:
        """Compile and load sources that are not loaded yet, several at a time. Raises
        BuildError."""
        missing = [source for source in dict.fromkeys(sources) if source not in self._loaded]
        # A single source is compiled at once, not after those that are built ahead.
        if len(missing) > 1:
            self.build_ahead(missing)
        for source in missing:
            coming = self._coming.pop(source, None)
            cubin = self.builder.cubin(source) if coming is None else coming.result()
            self._loaded[source] = self._load(source, cubin)
        if not self._coming:
            self.close()

    def close(self) -> None:
        """Give up builds that have not begun."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self._threads = None
        self._coming.clear()

    def function(self, source: Source, entry: str) -> Any:
        """Kernel ``entry`` of a module. Raises BuildError when there is none of that name."""
        if source not in self._loaded:
            self.prepare((source,))
        try:
            return self.context.call("cuModuleGetFunction", self._loaded[source], entry.encode())
        except CudaError as error:
            if error.name != NOT_FOUND:
                raise
            problem = f"it has no kernel {entry}"
            raise BuildError(self.device.name, source.name, problem) from None

    def _load(self, source: Source, cubin: bytes) -> Any:
        try:
            return self.context.call("cuModuleLoadData", cubin)
        except CudaError as error:
            if error.name not in REFUSED:
                raise
        # An undamaged cache entry may still be one that this driver rejects.
        cubin = self.builder.cubin(source, fresh=True)
        return self.context.call("cuModuleLoadData", cubin)
