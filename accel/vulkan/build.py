"""Compiles the kernels ahead of time: GLSL to exact SPIR-V, kept as ``modules/*.zrt``.

python -m accel.vulkan.build    needs the programs of compiler.py; users of the tier do not
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
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
from accel.vulkan.compiler import COMPILER, run
from accel.vulkan.pushed import push_size
from accel.vulkan.spirv import exact, group_memory_bytes, uses_integer_dot
from accel.vulkan.unrolled import PASSES, unrolled
from contract.kernel import GpuTarget, KernelHeader, encode_kernel

ENVIRONMENT = "vulkan1.2"
FOLDER = Path(__file__).with_name("modules")
DOT_PRODUCT = re.compile(r"^(?!#define|FN ).*\b(ADD_)?SU?DOT4\(", re.MULTILINE)
"""A kernel that uses packed dot products, not their definitions."""
UNROLLED_OPS = (ATTENTION_TILES,)
"""Kernels that keep arrays in registers, which drivers are not to put into memory."""


class CompileError(Exception):
    """glslang rejected a kernel; the message is its log."""


@dataclass(frozen=True, slots=True)
class Build:
    """One module as it is to be built, ``dot`` with packed dot products of the device, ``matrix``
    with its matrix units."""

    module: Module
    dot: bool = False
    matrix: bool = False

    @property
    def name(self) -> str:
        """Its name, that of its file without the ending."""
        return file_name(self.module, self.dot, self.matrix)

    @property
    def text(self) -> str:
        """What glslang gets, and behind it what is done to what it gives."""
        traits = Traits(dot=self.dot, matrix=self.matrix)
        text = module_source(Language.VULKAN, self.module, traits)
        return f"{text}// {' '.join(PASSES)}\n" if self.is_unrolled else text

    @property
    def is_unrolled(self) -> bool:
        """Whether its loops are written out before a driver sees them."""
        return self.module.op in UNROLLED_OPS

    @property
    def digest(self) -> str:
        """SHA-256 of the text."""
        return digest_of(self.text)


def file_name(module: Module, dot: bool = False, matrix: bool = False) -> str:
    """The name under which a module is kept."""
    return f"{module}{'.dot' if dot else ''}{'.matrix' if matrix else ''}"


def builds() -> Iterator[Build]:
    """Every module, those whose text uses them with packed dot products of the device, and those
    of matrix units and what they need."""
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
    """What the compiler calls itself. Raises FileNotFoundError where it is not installed."""
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
    """What is made of the compiler's SPIR-V. Raises InexactModule and OptimizerError."""
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


def made(build: Build) -> bytes:
    """Its file. Raises CompileError and InexactModule."""
    code = compiled(build)
    assert uses_integer_dot(code) == build.dot, build.name
    return kernel_file(build, code)


if __name__ == "__main__":
    refresh(FOLDER, compiler_version(), builds(), made)
