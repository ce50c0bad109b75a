"""A test double of ``cuda.bindings.nvrtc``."""

from __future__ import annotations

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
        self.log = b"error: no, no"

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

    def nvrtcGetCUBIN(self, program: Any, target: bytearray) -> tuple[Any, ...]:
        _write(target, program.code)
        return (SUCCESS,)

    def nvrtcGetProgramLogSize(self, program: Any) -> tuple[Any, ...]:
        return SUCCESS, len(self.log) + 1

    def nvrtcGetProgramLog(self, program: Any, target: bytearray) -> tuple[Any, ...]:
        _write(target, self.log + b"\0")
        return (SUCCESS,)

    def nvrtcDestroyProgram(self, program: Any) -> tuple[Any, ...]:
        return (SUCCESS,)


def _write(target: bytearray, data: bytes) -> None:
    """As NVRTC does through a pointer, which would change even what Python shares."""
    assert isinstance(target, bytearray), f"{type(target).__name__} is written to"
    target[:] = data
