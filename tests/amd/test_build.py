"""The kernels of the package are those of the texts beside them."""

import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from accel.amd.generation import GENERATIONS
from accel.amd.isa.code_object import kernel_of, read_code_object
from accel.amd.kernel_files import FOLDER, folder_of
from accel.amd.program import LoadedKernel, Modules
from accel.amd.tools import build as build_module
from accel.amd.tools.build import (
    COMPILER,
    OPTIONS,
    Build,
    CompileError,
    builds,
    compiled,
    compiled_file,
    compiler_version,
    make_kernel,
)
from accel.kernels.source import Module
from accel.kernels.stored import DIGESTS, digest_of, read_digests
from contract.dtypes import Q4_K
from contract.errors import CodecError
from contract.opcodes import Opcode
from harness.parity.cases import all_cases
from harness.parity.execute import compare
from tests.amd.code import SAMPLE, need_program
from tests.needs import machine_lacks

RMS_NORM = Build(Module("rms_norm"), True)


@pytest.fixture(scope="module")
def code_object() -> bytes:
    """What clang makes of a kernel."""
    need_program(COMPILER)
    return compiled(RMS_NORM.text)


by_gpu = pytest.mark.parametrize("gpu", GENERATIONS, ids=lambda gpu: gpu.cpu)


@by_gpu
def test_every_kernel_was_built_from_the_text_of_now(gpu):
    """And the package has no other; those without integers instead have one file."""
    known = {build.name: digest_of(build.text) for build in builds(gpu)}
    assert read_digests(folder_of(gpu)).modules == known, "run python -m accel.amd.tools.build"
    files = {path.name for path in folder_of(gpu).iterdir()} - {DIGESTS}
    assert files <= {f"{name}.zrt" for name in known}
    assert files >= {f"{name}.zrt" for name in known if not name.endswith(".integer")}


@by_gpu
@pytest.mark.parametrize(
    "step",
    [pytest.param(6 * SAMPLE, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.soak)],
)
@pytest.mark.timeout(3600)
def test_building_again_gives_the_same_files(gpu, step):
    """Byte for byte, with the compiler they were made with."""
    need_program(COMPILER)
    if compiler_version() != read_digests(folder_of(gpu)).compiler:
        machine_lacks("clang that the kernels were built with")
    for build in list(builds(gpu))[::step]:
        path = folder_of(gpu) / f"{build.name}.zrt"
        assert compiled_file(build) == (path.read_bytes() if path.is_file() else None), build.name


def test_a_changed_text_is_noticed(monkeypatch):
    """Negative control: one more comment."""
    original = build_module.module_source
    monkeypatch.setattr(build_module, "module_source", lambda *a: original(*a) + "// more\n")
    assert read_digests(FOLDER).modules["rms_norm"] != digest_of(RMS_NORM.text)


def test_a_kernel_that_does_not_compile_is_named(monkeypatch):
    need_program(COMPILER)
    original = build_module.module_source
    monkeypatch.setattr(build_module, "module_source", lambda *a: original(*a) + "nonsense\n")
    with pytest.raises(CompileError, match=r"^rms_norm: rms_norm.k:\d+:\d+: error"):
        make_kernel(RMS_NORM)


@pytest.mark.long
def test_contraction_makes_other_numbers(open_amd, monkeypatch):
    """Negative control: a kernel compiled with fused products differs from the definition."""
    need_program(COMPILER)
    rope = Build(Module("rope"), True)
    text = rope.text.replace("FP_CONTRACT OFF", "FP_CONTRACT ON")
    options = [o.replace("contract=off", "contract=fast") for o in OPTIONS]
    monkeypatch.setattr(build_module, "OPTIONS", options)
    kernel = kernel_of(read_code_object(compiled(text)), "rope", rope.module.entry, 128)
    tier = open_amd()
    contracted = tier._runtime.modules.load(kernel)
    own = Modules.kernel

    def instead(self: Modules, module: Module, native: bool | None = None) -> LoadedKernel:
        return contracted if module == rope.module else own(self, module, native)

    cases = [case for case in all_cases(1) if case.opcode is Opcode.ROPE][:3]
    assert not any(compare(tier, case) for case in cases)
    monkeypatch.setattr(Modules, "kernel", instead)
    assert any(compare(tier, case) for case in cases)


def test_what_is_no_code_object(code_object):
    for data, problem in (
        (b"", "not a little-endian ELF64"),
        (Path("/bin/sh").read_bytes(), "not an AMD GPU's"),
        (_patched(code_object, 8, "B", 2), "ABI version 2"),
        (_patched(code_object, 48, "<I", 0x4A), "architecture 0x4a is not one of GFX1201, GFX1100"),
        (_patched(code_object, 60, "<H", 5000), "section table is damaged"),
    ):
        with pytest.raises(CodecError, match=problem):
            read_code_object(data)


def test_a_kernel_that_wants_more_than_a_launch_gives(code_object):
    """Scratch memory, other arguments, another wave size, another float mode."""
    symbol = RMS_NORM.module.entry
    code = read_code_object(code_object)
    address, _ = code.symbols[f"{symbol}.kd"]
    section = next(s for s in code.sections if s.address <= address < s.address + s.size)
    at = section.offset + address - section.address
    for offset, bucket, value, problem in (
        (4, "<I", 16, "16 bytes of scratch memory a lane"),
        (8, "<I", 296, "296 bytes of arguments, not 32"),
        (56, "<H", 8, "properties 0x8, not 0x408"),
        (48, "<I", 0x600C0000, "float mode 0xc0"),
    ):
        spoiled = _patched(code_object, at + offset, bucket, value)
        with pytest.raises(CodecError, match=problem):
            kernel_of(read_code_object(spoiled), "rms_norm", symbol, 128)
    with pytest.raises(CodecError, match=r"no symbol other\.kd"):
        kernel_of(code, "other", "other", 128)


def test_a_kernel_as_it_is_stored(code_object):
    """The descriptor's register with the size of group memory put in."""
    kernel = kernel_of(read_code_object(code_object), "rms_norm", RMS_NORM.module.entry, 128)
    granules = -(-kernel.lds_bytes // 512)
    assert kernel.rsrc2 == 0x84 | granules << 15
    assert kernel.user_sgpr_count == 2
    assert kernel.subgroup_size == 32
    matmul = replace(RMS_NORM, module=Module("matmul", Q4_K))
    assert "DTYPE 12" in matmul.text


def test_the_compiler_is_told_nothing_else(code_object):
    """The same text gives the same bytes."""
    assert compiled(RMS_NORM.text) == code_object
    done = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True)
    assert compiler_version() in done.stdout


def _patched(data: bytes, offset: int, bucket: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(bucket, changed, offset, value)
    return bytes(changed)
