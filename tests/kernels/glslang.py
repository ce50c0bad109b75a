"""glslang within this process: one of its own takes twenty times as long to learn the language as
to compile a kernel. Its C interface is ``glslang_c_interface.h``."""

from __future__ import annotations

import ctypes
import subprocess
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accel.vulkan.build import COMPILER, ENVIRONMENT, PACKAGES, run
from tests.needs import missing

GLSL, VULKAN, SPIRV, COMPUTE, CORE_PROFILE = 1, 1, 1, 5, 2
VULKAN_1_2, SPIRV_1_5 = 1 << 22 | 2 << 12, 1 << 16 | 5 << 8
RULES = 1 << 3 | 1 << 4
"""Of SPIR-V and of Vulkan."""


class Input(Structure):
    """``glslang_input_t``."""

    _fields_ = (
        *((name, c_int) for name in ("language", "stage", "client", "client_version")),
        *((name, c_int) for name in ("target_language", "target_language_version")),
        ("code", c_char_p),
        *((name, c_int) for name in ("default_version", "default_profile", "force_default")),
        *((name, c_int) for name in ("forward_compatible", "messages")),
        ("resource", c_void_p),
        *((name, c_void_p) for name in ("include_system", "include_local", "free_include")),
        ("callbacks_context", c_void_p),
    )


class Options(Structure):
    """``glslang_spv_options_t``."""

    _fields_ = tuple(
        (name, c_bool)
        for name in (
            *("generate_debug_info", "strip_debug_info", "disable_optimizer", "optimize_size"),
            *("disassemble", "validate", "shader_debug_info", "shader_debug_source"),
            "compile_only",
        )
    )


def said_by(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a program of ``accel.vulkan.build`` says."""
    try:
        return run(program, arguments)
    except FileNotFoundError as error:
        missing(f"{program} is not installed", str(error))


class Rejected(Exception):
    """A text is not GLSL; the message is the compiler's."""


class Glslang:
    """The libraries of the package that ``accel.vulkan.build`` takes its programs from."""

    def __init__(self, folder: Path) -> None:
        self._language = _library(folder / "libglslang.so")
        self._limits = _library(folder / "libglslang-default-resource-limits.so")
        self._spirv = _library(folder / "libSPIRV.so")
        assert self._language.glslang_initialize_process()
        self._resource = _typed(self._limits.glslang_default_resource, c_void_p)()

    def compile(self, text: str) -> bytes:
        """The SPIR-V of a compute kernel, as the program makes it. Raises Rejected."""
        given = Input(
            *(GLSL, COMPUTE, VULKAN, VULKAN_1_2, SPIRV, SPIRV_1_5, text.encode()),
            *(100, CORE_PROFILE, 0, 0, RULES, self._resource),
        )
        language = self._language
        shader = _typed(language.glslang_shader_create, c_void_p, POINTER(Input))(byref(given))
        program = _typed(language.glslang_program_create, c_void_p)()
        try:
            for step in (language.glslang_shader_preprocess, language.glslang_shader_parse):
                if not _typed(step, c_int, c_void_p, POINTER(Input))(shader, byref(given)):
                    raise Rejected(self._said(language.glslang_shader_get_info_log, shader))
            _typed(language.glslang_program_add_shader, None, c_void_p, c_void_p)(program, shader)
            if not _typed(language.glslang_program_link, c_int, c_void_p, c_int)(program, RULES):
                raise Rejected(self._said(language.glslang_program_get_info_log, program))
            return self._generated(program)
        finally:
            _typed(language.glslang_program_delete, None, c_void_p)(program)
            _typed(language.glslang_shader_delete, None, c_void_p)(shader)

    def _generated(self, program: int) -> bytes:
        spirv, options = self._spirv, Options(disable_optimizer=True)
        generate = spirv.glslang_program_SPIRV_generate_with_options
        _typed(generate, None, c_void_p, c_int, POINTER(Options))(program, COMPUTE, byref(options))
        words = _typed(spirv.glslang_program_SPIRV_get_size, c_size_t, c_void_p)(program)
        code = (c_uint * words)()
        _typed(spirv.glslang_program_SPIRV_get, None, c_void_p, POINTER(c_uint))(program, code)
        return bytes(code)

    @staticmethod
    def _said(ask: Any, of: int) -> str:
        return (_typed(ask, c_char_p, c_void_p)(of) or b"").decode(errors="replace")


class Program:
    """The program, for machines that have no such package."""

    def compile(self, text: str) -> bytes:
        """The same. Raises Rejected."""
        with TemporaryDirectory() as folder:
            source, target = Path(folder, "kernel.comp"), Path(folder, "kernel.spv")
            source.write_text(text, encoding="utf-8")
            options = ("--target-env", ENVIRONMENT, "-V", str(source), "-o", str(target))
            done = said_by(COMPILER, *options)
            if done.returncode:
                raise Rejected(done.stdout)
            return target.read_bytes()


@cache
def glslang() -> Glslang | Program:
    """The compiler, made once."""
    try:
        distribution = metadata.distribution(PACKAGES[COMPILER])
    except metadata.PackageNotFoundError:
        return Program()
    return Glslang(Path(str(distribution.locate_file("cmeel.prefix"))) / "lib")


def _library(path: Path) -> ctypes.CDLL:
    """Names are bound when they are first called, each library's by those that were loaded."""
    return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def _typed(function: Any, result: type | None, *of: type) -> Any:
    function.restype, function.argtypes = result, of
    return function
