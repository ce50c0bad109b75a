"""Kernels that come as ``.zrt`` files of CUDA C++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel.cuda.program import Source
from contract.kernel import GpuTarget, KernelHeader, decode_text


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A kernel file whose code is CUDA C++, built for this device."""

    header: KernelHeader
    function: Any


def source_of(blob: bytes) -> tuple[KernelHeader, Source]:
    """What a file says, and its text. Raises CodecError for one that is damaged or no CUDA C++."""
    header, text = decode_text(blob, GpuTarget.CUDA_C)
    return header, Source(header.name, text)
