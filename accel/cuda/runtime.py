"""An opened device: context, stream, memory, and the kernels loaded into it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.cuda.arrange import Arranger
from accel.cuda.device import Device, find_device
from accel.cuda.driver import NOT_READY, TIER, Context, CudaError, Driver
from accel.cuda.finite import FiniteCheck
from accel.cuda.launcher import PROGRAMMATIC_CAPABILITY
from accel.cuda.memory import Memory, Pinned, Streams
from accel.cuda.program import Builder, Compiler, Modules
from accel.cuda.self_check import check_arithmetic
from accel.cuda.step_choice import AUTO, VARIABLE, StepChoice, chosen_step
from accel.cuda.stop_word import StopWord, make_stop_word
from accel.cuda.upload import Uploader
from accel.packets.build import Progress
from contract.errors import TierUnavailable

BUSY = ("CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA_ERROR_OUT_OF_MEMORY")
FAULTS = (
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
)
"""After these the driver refuses everything the process asks of the device."""


PEER_REMEDY = "see nvidia-smi topo -p2p rw"
POLL_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Choices:
    """What a caller may decide; None leaves it to the device.

    ``memory_bytes`` is the most device memory, ``cache`` the folder of cubins, None for no cache on
    disk. ``graphs`` False launches every kernel of every step by itself; ``programmatic`` False
    starts none before the one in front of it has ended. ``step`` is what ``persistent`` says of its
    variable.
    """

    memory_bytes: int | None = None
    cache: Path | None = None
    graphs: bool = True
    programmatic: bool = True
    step: str = field(default_factory=lambda: os.environ.get(VARIABLE, AUTO))


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything a tier needs of an opened device. ``step`` says where persistent
    kernels take the place of launches; ``stop`` ends them."""

    device: Device
    context: Context
    memory: Memory
    modules: Modules
    uploader: Uploader
    arranger: Arranger
    finite: FiniteCheck
    compiler: str
    programmatic: bool
    graphs: bool
    step: StepChoice
    stop: StopWord | None

    def close(self) -> None:
        """Wait for the device and give everything back."""
        self.modules.close()
        self.uploader.close()
        self.memory.synchronize()
        self.context.close()
        self.memory.pinned.forget()

    def give_up(self) -> None:
        """The device has failed: what it held is gone."""
        self.modules.close()
        with suppress(CudaError):
            self.context.close()
        self.uploader.forget()
        self.memory.pinned.forget()

    def reach(self, others: Sequence[Runtime]) -> None:
        """Let kernels write to the memory of other devices. Raises TierUnavailable."""
        for other in others:
            try:
                self.context.reach(other.context)
            except CudaError as error:
                names = f"{self.device.numbered} cannot reach the memory of {other.device.numbered}"
                raise TierUnavailable(TIER, f"{names} ({error})", PEER_REMEDY) from None

    def stop_waiting(self) -> None:
        """Let kernels that wait for others come to an end."""
        if self.stop is not None and not self.context.closed:
            self.stop.set()

    def give_back(self, deadline: float) -> None:
        """Give the device up once it is idle or has failed; at ``deadline``, by
        ``time.monotonic``, it is abandoned."""
        while not self.context.closed:
            try:
                self.context.call("cuStreamQuery", self.memory.stream)
            except CudaError as error:
                if error.name == NOT_READY:
                    if time.monotonic() > deadline:
                        self.abandon()
                    time.sleep(POLL_SECONDS)
                    continue
            self.give_up()

    def abandon(self) -> None:
        """The device does not answer: what it holds stays with it."""
        self.stop_waiting()
        self.modules.close()
        self.context.abandon()
        self.uploader.forget()
        self.memory.pinned.abandon()


def open_runtime(
    driver: Driver,
    requested: str,
    choices: Choices,
    progress: Progress | None = None,
    compiler: Compiler | None = None,
    shared: bool = False,
) -> Runtime:
    """Open a device and test it. ``compiler`` stands in for NVRTC; a ``shared`` device waits for
    others, too.

    Raises TierUnavailable when there is no usable device or it cannot keep to the arithmetic,
    BuildError when the compiler rejects a kernel, and ConfigError for a choice of ``step`` that is
    none.
    """
    step = chosen_step(choices.step)
    compiler = compiler or Compiler()
    device = find_device(driver, requested)
    try:
        context = Context(driver, device.ordinal)
    except CudaError as error:
        raise _unavailable(device, error) from None
    try:
        streams = Streams(_stream(context), _stream(context), _stream(context))
        capacity = min(choices.memory_bytes or device.memory_bytes, device.memory_bytes)
        memory = Memory(context, streams, capacity, Pinned(context))
        builder = Builder(compiler, device.architecture, choices.cache, progress)
        modules = Modules(context, device, builder)
        check_arithmetic(memory, modules)
        stop = make_stop_word(memory, _stream(context)) if step.blocks or shared else None
    except CudaError as error:
        with suppress(CudaError):
            context.close()
        raise _unavailable(device, error) from None
    except BaseException:
        context.close()
        raise
    uploader = Uploader(memory)
    memory.spare = uploader.close
    programmatic = choices.programmatic and device.capability >= PROGRAMMATIC_CAPABILITY
    return Runtime(
        device,
        context,
        memory,
        modules,
        uploader,
        Arranger(memory, modules, uploader),
        FiniteCheck(memory, modules),
        compiler.version,
        programmatic,
        choices.graphs,
        step,
        stop,
    )


def _unavailable(device: Device, error: CudaError) -> TierUnavailable:
    reason, remedy = f"{device.name}: {error}", "see nvidia-smi"
    if error.name in BUSY:
        remedy = "stop what uses it"
    elif error.name in FAULTS:
        reason = f"{device.name} refuses this process since a kernel of it faulted ({error})"
        remedy = "start a new process"
    return TierUnavailable(TIER, reason, remedy)


def _stream(context: Context) -> Any:
    """One of its own, which waits for no other."""
    flags = context.binding.CUstream_flags
    return context.call("cuStreamCreate", flags.CU_STREAM_NON_BLOCKING)
