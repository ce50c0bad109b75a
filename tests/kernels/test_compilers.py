"""Every module of the kernel dialect compiles as GLSL and as CUDA."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from accel.kernels.source import (
    Language,
    Module,
    Traits,
    module_source,
    modules,
)
from accel.vulkan.compiler import COMPILER, VALIDATOR, run
from tests.needs import missing, need_module

OLDEST, NEWEST = "sm_80", "sm_90a"
NATIVE = Traits(dot=True)
INTEGERS = Traits(divide=False, root=False, half=False)
MODULES = modules()
ONE_OF_EACH = tuple({module.op: module for module in MODULES}.values())
GLSL_OPTIONS = ("--quiet", "--target-env", "vulkan1.2")


def said_by(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a program of ``accel.vulkan.compiler`` says."""
    try:
        return run(program, arguments)
    except FileNotFoundError as error:
        missing(f"{program} is not installed", str(error))


def compiled(text: str, folder: Path) -> tuple[str, Path]:
    """What the compiler says, nothing if all is well, and the module it made."""
    source, module = folder / "kernel.comp", folder / "kernel.spv"
    source.write_text(text, encoding="utf-8")
    result = said_by(COMPILER, *GLSL_OPTIONS, "-o", str(module), str(source))
    return (result.stdout if result.returncode else ""), module


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_glsl(module: Module, tmp_path: Path) -> None:
    """With the device's own arithmetic and without; the modules are valid."""
    for traits in (NATIVE, INTEGERS):
        text = module_source(Language.VULKAN, module, traits)
        said, built = compiled(text, tmp_path)
        assert not said
        result = said_by(VALIDATOR, "--target-env", "vulkan1.2", str(built))
        assert result.returncode == 0, result.stderr


def test_an_error_in_glsl_is_found_where_it_is(tmp_path: Path) -> None:
    """The compiler names the kernel's file and line."""
    text = module_source(Language.VULKAN, Module("add")).replace("A(a) + A(b)", "A(a) +")
    said, _ = compiled(text, tmp_path)
    assert "add.k:6" in said


def built_by_nvrtc(text: str, architecture: str) -> str:
    """What NVRTC says, nothing if all is well."""
    nvrtc = need_module("cuda.bindings.nvrtc", "cuda")
    options = [f"--gpu-architecture={architecture}", "--fmad=false", "--std=c++17"]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    try:
        nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        return log.decode().strip("\0 ")
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@pytest.mark.parametrize(
    ("module", "architecture"),
    [(module, NEWEST) for module in MODULES] + [(module, OLDEST) for module in ONE_OF_EACH],
    ids=str,
)
def test_cuda(module: Module, architecture: str) -> None:
    """Without a warning: everything for the newest, where a step's launches overlap, and every
    op in one format for the oldest."""
    assert built_by_nvrtc(module_source(Language.CUDA, module, NATIVE), architecture) == ""


def test_an_error_in_cuda_is_found_where_it_is() -> None:
    """The compiler names the kernel's file and line."""
    text = module_source(Language.CUDA, Module("add")).replace("A(a) + A(b)", "A(a) +")
    assert "add.k(6)" in built_by_nvrtc(text, OLDEST)
