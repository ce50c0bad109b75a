"""Kernels of the OpenCL tier run on packets alone: by work-items, each a core, or by groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from accel.opencl import binding as cl
from accel.opencl.program import build_program, cpu_flags, op_files
from contract.dtypes import WEIGHT_DTYPES, DType
from tests.kernels.processor import ProcessorModules, cpu_device
from tests.needs import machine_lacks

Run = Callable[[str, NDArray[np.void], int, DType], None]
"""Runs a packet of an op by so many workers; the storage type of what it reads."""
ENTRY = """
__kernel void run_NAME(ulong packet) {
    MEMORY_MAP map;
    map.scratch = map.own = map.input = 0;
    op_NAME(&map, (const GLOBAL PACKET *)packet, get_global_id(0), get_global_size(0));
}
"""


@dataclass(frozen=True)
class Variant:
    """Which code a build holds: macros to undefine, and build options."""

    hidden: tuple[str, ...]
    vnni: bool
    dtypes: tuple[DType, ...] = WEIGHT_DTYPES


def run_by_cores(variant: Variant, ops: tuple[str, ...], formats: frozenset[str]) -> Run:
    """Packets of ``ops`` are walked by work-items, each of them a core."""
    device = cpu_device()
    if variant.vnni and not (device.is_pocl and "avx512_vnni" in cpu_flags()):
        machine_lacks("AVX-512 VNNI")
    context = cl.Context([device.handle])
    queue = cl.CommandQueue(context)
    files = {
        "variant.h": "".join(f"#undef {macro}\n" for macro in variant.hidden),
        **op_files(ops, formats),
        "entry.cl": "".join(ENTRY.replace("NAME", name) for name in ops),
    }
    options = (
        "-cl-std=CL1.2 -DSHARED_ADDRESSES=1 -DNATIVE_DIVIDE=1 -DNATIVE_SQRT=1 "
        f"-DDOT_VNNI={variant.vnni:d}"
    )
    program = build_program(context, device, files, options, None)
    kernels = {name: cl.Kernel(program, f"run_{name}") for name in ops}

    def run(op: str, packet: NDArray[np.void], workers: int, dtype: DType) -> None:
        kernels[op].set_args(np.uint64(packet.ctypes.data))
        cl.enqueue_nd_range_kernel(queue, kernels[op], (workers,), (1,))
        queue.finish()

    return run


def run_by_groups() -> Run:
    """Packets are launches of work-groups."""
    modules = ProcessorModules()
    return lambda op, packet, groups, dtype: modules.launch(op, packet, groups, dtype)
