"""Metal texts of the kernel dialect as C++, launched on arrays of this process."""

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path

from accel.kernels.source import Module
from accel.metal.sim.fake_compiler import FakeCompiler
from tests.needs import need_device

ARGUMENTS = struct.Struct("<3Q2I")
"""``LAUNCH`` of ``kernels/msl.h``: where scratch, inputs and packets lie, and which packet."""

Run = Callable[[int, int], bool]


def compiled(module: Module, text: str, cache: Path) -> Run:
    """The launch of a module's text as a function of the address of its packet and the number of
    groups; False if items of a group parted at a barrier. Raises CompileError."""
    library = need_device(lambda: FakeCompiler(cache).kernel(text, fast=False))
    run = ctypes.CDLL(str(library)).run

    def launch(packet: int, groups: int) -> bool:
        arguments = ARGUMENTS.pack(0, 0, packet, 0, 0)
        return bool(run(arguments, groups, module.group_size))

    return launch
