"""Modules are exact: nothing may be contracted, and nothing drivers disagree about is used."""

import subprocess
from pathlib import Path

import pytest

from accel.kernels.stored import read_digests
from accel.vulkan.build import COMPILER, FOLDER, VALIDATOR, run
from accel.vulkan.matrices import GROUP_MEMORY_BYTES
from accel.vulkan.spirv import (
    FLOAT_ARITHMETIC,
    FLOAT_CONTROLS,
    InexactModule,
    decorated_results,
    exact,
    group_memory_bytes,
    instructions,
    uses_integer_dot,
    with_float_controls,
    words_of,
)
from contract.kernel import KernelHeader, decode_kernel
from tests.long_cases import long_except
from tests.needs import missing

KERNEL = """#version 460
layout(local_size_x = 32) in;
shared uint group_memory[96];
layout(push_constant) uniform GIVEN { float a, b, c; } given;
layout(std430, binding = 0) buffer RESULT { float v[]; } result;
void main() {
    group_memory[gl_LocalInvocationID.x] = 1u;
    result.v[0] = EXPRESSION;
}
"""
NAMES = sorted(read_digests(FOLDER).modules)
ONE_OF_EACH = {(name.partition(".")[0], name.endswith((".dot", ".matrix"))): name for name in NAMES}
"""Of each op, and of what multiplies by other units."""


def said_by(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a program of ``accel.vulkan.build`` says."""
    try:
        return run(program, arguments)
    except FileNotFoundError as error:
        missing(f"{program} is not installed", str(error))


def compile_raw(folder: Path, expression: str, extension: str = "") -> bytes:
    """What glslang makes of a kernel, before the pass."""
    source, target = folder / "kernel.comp", folder / "kernel.spv"
    text = KERNEL.replace("EXPRESSION", expression)
    source.write_text(text.replace("460\n", f"460\n{extension}\n"))
    options = ("--target-env", "vulkan1.2", "-V", str(source), "-o", str(target))
    said_by(COMPILER, *options).check_returncode()
    return target.read_bytes()


def contractible(code: bytes) -> list[int]:
    """Float results that a driver may combine with others."""
    found = list(instructions(words_of(code)))
    decorated = decorated_results(found)
    return [i.result for i in found if i.opcode in FLOAT_ARITHMETIC and i.result not in decorated]


def validated(folder: Path, code: bytes) -> str:
    """What spirv-val has against a module, empty when nothing."""
    path = folder / "module.spv"
    path.write_bytes(code)
    done = said_by(VALIDATOR, "--target-env", "vulkan1.2", str(path))
    return done.stdout + done.stderr if done.returncode else ""


def kernel_named(name: str) -> KernelHeader:
    return decode_kernel((FOLDER / f"{name}.zrt").read_bytes())


@pytest.mark.parametrize("name", long_except(NAMES, *ONE_OF_EACH.values()))
def test_shipped_modules_are_exact_and_valid(name, tmp_path):
    """As they lie in the package and as a device with all float controls gets them."""
    kernel = kernel_named(name)
    assert contractible(kernel.code) == []
    assert exact(kernel.code) == kernel.code
    most = GROUP_MEMORY_BYTES if name.endswith(".matrix") else 32 << 10
    assert group_memory_bytes(kernel.code) == kernel.lds_bytes <= most
    assert uses_integer_dot(kernel.code) == name.endswith(".dot")
    controlled = with_float_controls(kernel.code, tuple(FLOAT_CONTROLS))
    assert validated(tmp_path, controlled) == ""


def test_the_compiler_alone_is_not_exact(tmp_path):
    """Negative control: before the pass results may be contracted; after it none may be."""
    code = compile_raw(tmp_path, "given.a * given.b + given.c")
    assert len(contractible(code)) == 2
    assert contractible(exact(code)) == []
    assert group_memory_bytes(code) == 4 * 96
    assert validated(tmp_path, with_float_controls(exact(code), ("RoundingModeRTE",))) == ""


@pytest.mark.parametrize("expression", ["fma(given.a, given.b, given.c)", "exp(given.a)"])
def test_what_drivers_disagree_about_is_refused(tmp_path, expression):
    with pytest.raises(InexactModule, match=r"GLSL.std.450 instruction \d+"):
        exact(compile_raw(tmp_path, expression))


def test_foreign_bytes_are_refused():
    for foreign in (b"", b"no module", bytes(64)):
        with pytest.raises(ValueError, match="not a SPIR-V module"):
            exact(foreign)


def test_an_instruction_beyond_the_end_is_refused():
    code = kernel_named("add").code
    with pytest.raises(ValueError, match="the SPIR-V instruction at word"):
        exact(code + (5 << 16).to_bytes(4, "little"))
