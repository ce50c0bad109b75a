"""Kernels that come as ``.zrt`` files of CUDA C++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.cuda.program import Source
from contract.errors import CodecError
from contract.kernel import GpuTarget, KernelHeader, decode_kernel


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A kernel file whose code is CUDA C++, built for this device."""

    header: KernelHeader
    function: Any


def source_of(blob: bytes) -> tuple[KernelHeader, Source]:
    """What a file says, and its text. Raises CodecError for one that is damaged or no CUDA C++."""
    header = decode_kernel(blob)
    if header.target is not GpuTarget.CUDA_C:
        raise CodecError(f"kernel {header.name}: target {header.target.name}, not CUDA_C")
    try:
        text = header.code.decode()
    except UnicodeDecodeError as error:
        raise CodecError(f"kernel {header.name}: source is not UTF-8 ({error})") from None
    return header, Source(header.name, text)
