"""Which parts the OpenCL programs of a test hold, and how PoCL compiles them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from accel.opencl import contents, program, runtime
from accel.opencl.contents import PARTS, RECURRENT, Parts
from accel.opencl.device import Device
from accel.opencl.launcher import Mode
from accel.opencl.program import build_step_program, module_options
from accel.opencl.runtime import Choices

SOME: Parts = frozenset(
    {"F32", "F16", "BF16", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", RECURRENT}
)
"""What models in Q4_K_M need, with experts and delta nets, and formats of every sort beside."""
HALF_OF_THEM: Parts = frozenset(PARTS[1::2])
"""Formats with and without tables, minima and upper bits, and floats."""
NEWER = ("__AVX512VNNI__", "__AVX512BW__", "__AVX512F__", "__AVX2__", "__SSSE3__")
"""What compilers define for a processor that has such instructions."""

QUICK = "-cl-opt-disable"
"""Takes half of the compiler's time off."""
USUAL = {"-DPERSISTENT=1", "-DSHARED_ADDRESSES=1", "-DNATIVE_DIVIDE=1", "-DNATIVE_SQRT=1"}
"""Of the one program that users of a processor have."""


def quick_options(device: Device) -> str:
    """Of kernels of accelerators on a processor."""
    return f"{module_options(device)} {QUICK}"


def quick_step_program(context: Any, device: Device, parts: Parts, options: str, *rest: Any) -> Any:
    """``build_step_program``, optimized where a processor's users have that program."""
    if not USUAL.issubset(options.split()):
        options = f"{options} {QUICK}"
    return build_step_program(context, device, parts, options, *rest)


@contextmanager
def little_optimized() -> Iterator[None]:
    """The code of ways to run that users of a processor seldom get, and of accelerators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "module_options", quick_options)
        patch.setattr(runtime, "build_step_program", quick_step_program)
        yield


@contextmanager
def portable() -> Iterator[None]:
    """Kernels have the code for processors without vector instructions, hardly optimized."""
    constants, hidden = program.packet_constants, "".join(f"#undef {macro}\n" for macro in NEWER)

    def quick(context: Any, device: Device, parts: Parts, options: str, *rest: Any) -> Any:
        return build_step_program(context, device, parts, f"{options} {QUICK}", *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "packet_constants", lambda: hidden + constants())
        patch.setattr(runtime, "build_step_program", quick)
        yield


@contextmanager
def holding(parts: Parts, really: bool = True) -> Iterator[None]:
    """Programs hold ``parts`` and what graphs need; by themselves tests build everything."""
    with pytest.MonkeyPatch.context() as patch:
        if really:
            patch.setattr(contents, "ALWAYS", parts)
        yield


def is_usual(choices: Choices) -> bool:
    """Whether a tier runs as users have it. Each other way takes programs of its own, which SOME
    parts are enough for."""
    kept = choices.shared_addresses is not False and choices.native_arithmetic is not False
    return kept and choices.mode is not Mode.LAUNCH
