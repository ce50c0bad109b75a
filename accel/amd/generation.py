"""The GPUs that have kernels, and their differences other than instructions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accel.amd import pm4
from accel.amd.isa.decode import TTMP
from contract.kernel import GpuTarget

PRIVILEGED = 1 << 20
"""The bit PRIV of RSRC1."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """``target`` is the compilation target, ``cpu`` the compiler's name of it.

    A dispatch fills ``user_registers`` scalar registers of a kernel, which finds the number of its
    group in ``group_register``. ``matrices``: there are kernels of matrix instructions.
    ``amdkfd_rsrc1`` are bits of RSRC1 that queues of amdkfd need."""

    target: GpuTarget
    cpu: str
    user_registers: int
    group_register: int
    caches: pm4.Caches
    matrices: bool = False
    amdkfd_rsrc1: int = 0


GFX12 = Generation(GpuTarget.GFX1201, "gfx1201", 2, TTMP + 9, pm4.GFX12_CACHES, matrices=True)
GFX11 = Generation(
    GpuTarget.GFX1100,
    "gfx1100",
    # The compiler counts all registers up to that of the group's number.
    user_registers=15,
    group_register=15,
    caches=pm4.GFX11_CACHES,
    # Without this the trap handler that saves waves of a preempted queue fails (kfdtest sets it
    # too).
    amdkfd_rsrc1=PRIVILEGED,
)
GENERATIONS = (GFX12, GFX11)
BY_ARCHITECTURE: Mapping[str, Generation] = {"gfx1200": GFX12, "gfx1201": GFX12, "gfx1100": GFX11}
"""Generations by the architecture that drivers report. Code of gfx1201 also runs on gfx1200; LLVM
calls this gfx12-generic without restrictions."""
