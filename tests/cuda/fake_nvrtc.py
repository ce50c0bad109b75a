"""A test double of ``cuda.bindings.nvrtc``."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from tests.cuda.fake_context import SUCCESS, CUresult


class FakeNvrtc:
    """NVRTC that accepts every text: the machine code is the text and how it was compiled."""

    nvrtcResult = SimpleNamespace(NVRTC_SUCCESS=SUCCESS)

    def __init__(self, version: tuple[int, int] = (13, 0)) -> None:
        self.version = version
        self.compiled: list[str] = []
        self.refuse = b"\0"

    def nvrtcVersion(self) -> tuple[Any, ...]:
        return SUCCESS, *self.version

    def nvrtcCreateProgram(self, text: bytes, name: bytes, *_: Any) -> tuple[Any, ...]:
        return SUCCESS, SimpleNamespace(text=text, name=name.decode())

    def nvrtcCompileProgram(self, program: Any, count: int, options: list[bytes]) -> tuple[Any]:
        self.compiled.append(program.name)
        program.code = b"\n".join([*options, program.text])
        return (CUresult.CUDA_ERROR_INVALID_VALUE if self.refuse in program.text else SUCCESS,)

    def nvrtcGetCUBINSize(self, program: Any) -> tuple[Any, ...]:
        return SUCCESS, len(program.code)

    def nvrtcGetCUBIN(self, program: Any, target: bytes) -> tuple[Any, ...]:
        ctypes.memmove(target, program.code, len(program.code))
        return (SUCCESS,)

    def nvrtcGetProgramLogSize(self, program: Any) -> tuple[Any, ...]:
        return SUCCESS, 13

    def nvrtcGetProgramLog(self, program: Any, target: bytes) -> tuple[Any, ...]:
        ctypes.memmove(target, b"error: no, no\0"[:13], 13)
        return (SUCCESS,)

    def nvrtcDestroyProgram(self, program: Any) -> tuple[Any, ...]:
        return (SUCCESS,)
