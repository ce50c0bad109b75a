"""Every module of the kernel dialect compiles as GLSL and as CUDA."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from accel.kernels.source import Language, Module, Traits, module_source, modules
from tests.needs import missing, need_module

ARCHITECTURES = ("sm_80", "sm_90a")
NATIVE = Traits(dot=True)
INTEGERS = Traits(divide=False, root=False, half=False)
MODULES = modules()
GLSL_OPTIONS = ("--quiet", "--target-env", "vulkan1.2")


def need_program(name: str, package: str) -> str:
    """The path of a program of a Debian package."""
    return shutil.which(name) or missing(f"{name} is not installed", f"apt-get install {package}")


@pytest.fixture(scope="module")
def glslang() -> str:
    return need_program("glslangValidator", "glslang-tools")


@pytest.fixture(scope="module")
def spirv_val() -> str:
    return need_program("spirv-val", "spirv-tools")


def compiled(glslang: str, text: str, folder: Path) -> tuple[str, Path]:
    """What the compiler says, nothing if all is well, and the module it made."""
    source, module = folder / "kernel.comp", folder / "kernel.spv"
    source.write_text(text, encoding="utf-8")
    command = [glslang, *GLSL_OPTIONS, "-o", str(module), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return (result.stdout if result.returncode else ""), module


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_glsl(glslang: str, spirv_val: str, module: Module, tmp_path: Path) -> None:
    """With the device's own arithmetic and without; the modules are valid."""
    for traits in (NATIVE, INTEGERS):
        text = module_source(Language.VULKAN, module, traits)
        said, built = compiled(glslang, text, tmp_path)
        assert not said
        command = [spirv_val, "--target-env", "vulkan1.2", str(built)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_an_error_in_glsl_is_found_where_it_is(glslang: str, tmp_path: Path) -> None:
    """The compiler names the kernel's file and line."""
    text = module_source(Language.VULKAN, Module("add")).replace("A(a) + A(b)", "A(a) +")
    said, _ = compiled(glslang, text, tmp_path)
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("module", MODULES, ids=str)
def test_cuda(module: Module, architecture: str) -> None:
    """Without a warning."""
    assert built_by_nvrtc(module_source(Language.CUDA, module, NATIVE), architecture) == ""


def test_an_error_in_cuda_is_found_where_it_is() -> None:
    """The compiler names the kernel's file and line."""
    text = module_source(Language.CUDA, Module("add")).replace("A(a) + A(b)", "A(a) +")
    assert "add.k(6)" in built_by_nvrtc(text, ARCHITECTURES[0])
