"""Compiles the texts of kernels to SPIR-V with the clang of the pip package ``ziglang``, and checks
that a module computes exactly what its text says.

Modules are cached by everything that their bytes depend on."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from accel.intel.api import TIER
from accel.native.compile import find_compiler
from accel.packets.build import BuildError, cache_entry
from accel.packets.disk_cache import read_entry, write_entry
from accel.vulkan.spirv import Instruction, Words, instructions, words_of
from contract.errors import TierUnavailable
from contract.extras import install_command

MAGIC = b"zinc-rt SPIR-V 1\n"
OPTIONS = (
    *("-cc1", "-triple", "spirv64v1.2-unknown-unknown", "-x", "cl", "-cl-std=CL1.2"),
    # Each operation is rounded by itself: clang neither fuses nor regroups, and tells the driver.
    "-ffp-contract=off",
    *("-cl-fp32-correctly-rounded-divide-sqrt", "-w", "-Wno-incompatible-pointer-types"),
)
OPTIMIZATIONS = ("-O2", "-O0")
"""Tried in turn: optimized, a text may use an instruction that SPIR-V for kernels lacks."""

EXECUTION_MODE, CONTRACTION_OFF = 16, 31
DECORATE, FAST_MATH_MODE = 71, 40
EXTENDED = 12
TYPE_INT, CONSTANT, CONSTANT_NULL = 21, 43, 46
EXACT_EXTENDED = frozenset((23, 61, 141, 151, 152, *range(156, 160), 163))
"""OpenCL.std instructions whose result is the same on every device, or tested when it is opened:
fabs, sqrt, s_abs, clz, ctz, s_max, u_max, s_min, u_min, u_sub_sat."""


class InexactKernel(Exception):
    """A module allows the driver other results than its text defines."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A clang that emits SPIR-V: ``command`` begins every call, ``version`` is what it prints."""

    command: tuple[str, ...]
    version: str
    cache: Path | None

    def compiled(self, name: str, text: str) -> bytes:
        """The module of a text, called ``name`` in errors. Raises BuildError."""
        entry = cache_entry(self.cache, (self.version, *OPTIONS, *OPTIMIZATIONS, text))
        code = read_entry(entry, MAGIC) if entry is not None else None
        if code is None:
            code = self._compile(name, text)
            if entry is not None:
                write_entry(entry, MAGIC, code)
        return code

    def _compile(self, name: str, text: str) -> bytes:
        log = ""
        with tempfile.TemporaryDirectory(prefix="zinc-rt-intel-") as folder:
            source, target = Path(folder, "kernel.cl"), Path(folder, "kernel.spv")
            source.write_text(text, encoding="utf-8")
            files = ("-emit-obj", str(source), "-o", str(target))
            for level in OPTIMIZATIONS:
                command = [*self.command, *OPTIONS, level, *files]
                done = subprocess.run(command, capture_output=True, check=False)
                if not done.returncode:
                    return exact(name, target.read_bytes())
                log = log or done.stderr.decode(errors="replace")
        raise BuildError(TIER, name, log)


def find_spirv_compiler(folder: Path | None) -> Compiler:
    """The compiler, with its cache in ``folder``. Raises TierUnavailable if there is none."""
    try:
        found = find_compiler()
    except TierUnavailable as error:
        hint = install_command("intel")
        raise TierUnavailable(TIER, "there is no compiler for its kernels", hint) from error
    command = (*found.command, "clang") if found.is_zig else found.command
    return Compiler(command, _version(command), folder)


@cache
def _version(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise TierUnavailable(
            TIER, f"the compiler of its kernels does not start ({error})", install_command("intel")
        ) from None
    return done.stdout.partition("\n")[0].strip()


def exact(name: str, code: bytes) -> bytes:
    """The module with zeros as constants that may index a structure. Raises BuildError unless it
    forbids contraction and has only exact instructions."""
    try:
        words = words_of(code)
        found = list(instructions(words))
        check_exact(found)
    except (ValueError, InexactKernel) as error:
        raise BuildError(TIER, name, str(error)) from None
    widths = {int(i.words[1]): int(i.words[2]) for i in found if i.opcode == TYPE_INT}
    return b"".join([words[:5].tobytes(), *(_plain(i, widths).tobytes() for i in found)])


def check_exact(found: list[Instruction]) -> None:
    """Raise InexactKernel unless every entry point forbids contraction, no result allows fast
    mathematics, and every extended instruction is exact."""
    modes = [i for i in found if i.opcode == EXECUTION_MODE]
    if not any(int(i.words[2]) == CONTRACTION_OFF for i in modes):
        raise InexactKernel("the module does not forbid contraction")
    if any(i.opcode == DECORATE and int(i.words[2]) == FAST_MATH_MODE for i in found):
        raise InexactKernel("the module allows fast mathematics")
    extended = {int(i.words[4]) for i in found if i.opcode == EXTENDED}
    if inexact := extended - EXACT_EXTENDED:
        numbers = ", ".join(map(str, sorted(inexact)))
        raise InexactKernel(f"OpenCL.std instructions are not known to be exact: {numbers}")


def _plain(i: Instruction, widths: dict[int, int]) -> Words:
    """Clang writes 0 as OpConstantNull, but an index of a structure has to be an OpConstant."""
    width = widths.get(int(i.words[1]), 0) if i.opcode == CONSTANT_NULL else 0
    if not width:
        return i.words
    values = [0] * (2 if width > 32 else 1)
    first = (3 + len(values)) << 16 | CONSTANT
    return np.array([first, *i.words[1:], *values], "<u4")
