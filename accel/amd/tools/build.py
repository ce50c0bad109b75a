"""Compiles the kernels ahead of time: OpenCL C to code of gfx1201 in ``modules/*.zrt``, and of
gfx1100 in ``modules_gfx1100/*.zrt``.

python -m accel.amd.tools.build    needs clang and lld 19; users of the tiers do not"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accel.amd.generation import GENERATIONS, GFX12, Generation
from accel.amd.isa.checks import check_code
from accel.amd.isa.code_object import kernel_of, read_code_object, uses_scratch
from accel.amd.kernel_files import file_name, folder_of
from accel.amd.sim.translate import check_translation
from accel.kernels.source import (
    MATRIX_OPS,
    Language,
    Module,
    Traits,
    matrix_modules,
    module_source,
    modules,
)
from accel.kernels.stored import refresh
from contract.kernel import KernelHeader, encode_kernel

COMPILER = "clang-19"
TARGET = ("-target", "amdgcn-amd-amdhsa")
OPTIONS = (
    *("-x", "cl", "-cl-std=CL2.0", *TARGET),
    *("-O2", "-mcumode", "-nogpulib", "-ffp-contract=off"),
    "-cl-fp32-correctly-rounded-divide-sqrt",
    # No measured kernel was faster with dual issue or scheduler hints.
    *("-mllvm", "-amdgpu-enable-vopd=0", "-mllvm", "-amdgpu-enable-delay-alu=0"),
)
WITHOUT_SCRATCH = (
    (),
    ("-mllvm", "-enable-misched=0"),
    ("-mllvm", "-amdgpu-unroll-threshold-private=6000"),
)
"""Options tried in turn until a kernel needs no scratch memory: the order of the text where the
compiler's own takes too many registers, then unrolled loops over arrays of an item."""
NATIVE = Traits(dot=True)
INTEGER = Traits(divide=False, root=False, dot=True)


class CompileError(Exception):
    """clang rejected a kernel; the message is its log."""


@dataclass(frozen=True, slots=True)
class Build:
    """One module to compile, ``native`` with the device's division and root."""

    module: Module
    native: bool
    gpu: Generation = GFX12

    @property
    def name(self) -> str:
        """The file name without its ending."""
        return file_name(self.module, self.native)

    @property
    def text(self) -> str:
        """The input of clang."""
        return module_source(Language.AMD, self.module, traits_of(self.module, self.native))


def traits_of(module: Module, native: bool) -> Traits:
    """The traits that a module is compiled for."""
    return replace(NATIVE if native else INTEGER, matrix=module.op in MATRIX_OPS)


def builds(gpu: Generation = GFX12) -> Iterator[Build]:
    """Every module, and a second time with division and root in integers, except products, which
    have none."""
    yield from (
        Build(module, native, gpu)
        for module in modules(repeating=False)
        for native in (True, False)
    )
    if gpu.matrices:
        yield from (Build(module, True, gpu) for module in matrix_modules())


def compiler_version() -> str:
    """The version that the compiler prints. Raises FileNotFoundError if it is not installed."""
    if shutil.which(COMPILER) is None:
        raise FileNotFoundError(f"{COMPILER} is not installed: apt install clang-19 lld-19")
    done = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0].strip()


def compiled(text: str, more: Sequence[str] = (), gpu: Generation = GFX12) -> bytes:
    """The code object that clang makes from OpenCL C. Raises CompileError with its log."""
    return _object(text, (*OPTIONS, f"-mcpu={gpu.cpu}", *more))


def assembled(text: str, gpu: Generation = GFX12) -> bytes:
    """The code object that clang makes from assembly. Raises CompileError with its log."""
    return _object(text, ("-x", "assembler", *TARGET, f"-mcpu={gpu.cpu}"))


def _object(text: str, options: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel"), Path(folder, "kernel.elf")
        source.write_text(text)
        command = [COMPILER, *options, str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(done.stderr.strip())
        return target.read_bytes()


def make_kernel(build: Build, text: str | None = None) -> KernelHeader:
    """The kernel, not checked yet; ``text`` replaces the module's own. Raises CompileError, and
    CodecError for code that needs what a launch does not give."""
    module = build.module
    try:
        for more in WITHOUT_SCRATCH:
            code = read_code_object(compiled(text or build.text, more, build.gpu))
            if not uses_scratch(code, module.entry):
                break
    except CompileError as error:
        raise CompileError(f"{build.name}: {error}") from None
    return kernel_of(code, build.name, module.entry, module.group_size)


def compiled_file(build: Build) -> bytes | None:
    """The file of a build; None for the integer variant of a module without division and root.
    Raises what ``make_kernel`` raises, and CodecError for code that ``check_code`` or
    ``check_translation`` refuses."""
    kernel = make_kernel(build)
    if not build.native and kernel.code == make_kernel(replace(build, native=True)).code:
        return None
    check_code(kernel)
    check_translation(kernel)
    return encode_kernel(kernel)


if __name__ == "__main__":
    for generation in GENERATIONS:
        refresh(folder_of(generation), compiler_version(), builds(generation), compiled_file)
