"""Code of the package's kernels, and instructions put together by hand."""

import shutil
import struct
from collections.abc import Iterator
from functools import cache

from accel.amd import pm4
from accel.amd.generation import GFX12, Generation
from accel.amd.kernel_files import folder_of
from accel.amd.sim.command_processor import WAIT_AT_LEAST
from contract.kernel import KernelHeader, decode_kernel
from tests.needs import machine_lacks


@cache
def shipped(name: str, gpu: Generation = GFX12) -> KernelHeader:
    """A kernel file of the package."""
    return decode_kernel((folder_of(gpu) / f"{name}.zrt").read_bytes())


def some_shipped(step: int = 1, gpu: Generation = GFX12) -> Iterator[KernelHeader]:
    """Every ``step``-th kernel file of the package."""
    for path in sorted(folder_of(gpu).glob("*.zrt"))[::step]:
        yield shipped(path.stem, gpu)


SAMPLE = 9
"""Of all kernels, a ninth is looked at in the ordinary suite."""


def words(*values: int) -> bytes:
    """Code of these 32-bit words."""
    return struct.pack(f"<{len(values)}I", *values)


def need_program(name: str) -> str:
    """A program of LLVM 19, which nobody who uses the tiers needs."""
    return shutil.which(name) or machine_lacks(name)


def wait_memory(address: int, least: int) -> pm4.Words:
    """A packet that waits until the 32 bits at ``address`` are at least ``least``, so that a queue
    hangs; the tiers send none."""
    halves = pm4.low_high(address)
    return pm4.packet(pm4.Opcode.WAIT_REG_MEM, WAIT_AT_LEAST, *halves, least, 0xFFFFFFFF, 4)
