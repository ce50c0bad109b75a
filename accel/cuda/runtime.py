"""An open device: context, streams, memory, and the kernels loaded into it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from accel.cuda.arrange import Arranger
from accel.cuda.device import PEER_REMEDY, Device, find_device
from accel.cuda.driver import NOT_READY, TIER, Context, CudaError, Driver
from accel.cuda.finite import FiniteCheck
from accel.cuda.launcher import PROGRAMMATIC_CAPABILITY
from accel.cuda.memory import Allocation, Memory, Pinned, Streams
from accel.cuda.program import Builder, Compiler, Modules
from accel.cuda.self_check import check_arithmetic
from accel.cuda.step_choice import AUTO, VARIABLE, StepChoice, chosen_step
from accel.cuda.upload import Uploader
from accel.packets.build import Progress
from contract.arrays import Bytes
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
"""Errors of a kernel after which the driver refuses every call of this process for the device."""
POLL_SECONDS = 1e-3
WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Choices:
    """Options of a caller; None leaves a choice to the device.

    ``memory_bytes`` is the most device memory, ``cache`` the folder of cubins, None for no cache on
    disk. With ``graphs`` False every kernel of every step is launched by itself; with
    ``programmatic`` False no kernel starts before the one before it has ended. ``step`` is
    described in ``step_choice``."""

    memory_bytes: int | None = None
    cache: Path | None = None
    graphs: bool = True
    programmatic: bool = True
    step: str = field(default_factory=lambda: os.environ.get(VARIABLE, AUTO))


@dataclass(frozen=True, slots=True)
class Runtime:
    """An open device.

    ``step`` says where persistent kernels replace launches; ``stop`` ends kernels that wait.
    ``compiler`` names the compiler. A device is closed by ``close`` when it is idle, else by
    ``close_failed``, ``close_by`` a deadline, or ``abandon``."""

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
    stop: StopWord

    def close(self) -> None:
        """Wait for the device and free everything."""
        self.modules.close()
        self.uploader.close()
        self.memory.synchronize()
        self.context.close()
        self.memory.pinned.forget()

    def close_failed(self) -> None:
        """Close a device that has failed, without waiting for its kernels."""
        self.modules.close()
        with suppress(CudaError):
            self.context.close()
        self.uploader.forget()
        self.memory.pinned.forget()

    def access_peers(self, others: Sequence[Runtime]) -> None:
        """Let kernels write to the memory of other devices. Raises TierUnavailable."""
        for other in others:
            try:
                self.context.access_peer(other.context)
            except CudaError as error:
                names = f"{self.device.numbered} cannot reach the memory of {other.device.numbered}"
                raise TierUnavailable(TIER, f"{names} ({error})", PEER_REMEDY) from None

    def stop_waiting(self) -> None:
        """Make kernels end that wait for other blocks or devices."""
        if not self.context.closed:
            self.stop.set()

    def close_by(self, deadline: float) -> bool:
        """Close the device as soon as its kernels have ended or failed, and return True. At
        ``deadline``, in seconds of ``time.monotonic``, abandon it and return False."""
        while not self.context.closed:
            try:
                self.context.call("cuStreamQuery", self.memory.stream)
            except CudaError as error:
                if error.name == NOT_READY:
                    if time.monotonic() > deadline:
                        self.abandon()
                        return False
                    time.sleep(POLL_SECONDS)
                    continue
            self.close_failed()
        return True

    def abandon(self) -> None:
        """Close a device whose kernels do not end: neither its context nor its memory is freed."""
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
) -> Runtime:
    """Open the device ``requested``, see ``find_device``, and test it.

    ``compiler`` replaces NVRTC. Raises TierUnavailable when there is no usable device or its
    arithmetic is not exact, BuildError when the compiler rejects a kernel, and ConfigError for an
    invalid choice of ``step``."""
    step = chosen_step(choices.step)
    compiler = compiler or Compiler()
    device = find_device(driver, requested)
    try:
        context = Context(driver, device.ordinal)
    except CudaError as error:
        raise _unavailable(device, error) from None
    try:
        streams = Streams(*(_stream(context) for _ in range(len(fields(Streams)))))
        capacity = min(choices.memory_bytes or device.memory_bytes, device.memory_bytes)
        memory = Memory(context, streams, capacity, Pinned(context))
        builder = Builder(compiler, device.architecture, choices.cache, progress)
        modules = Modules(context, device, builder)
        check_arithmetic(memory, modules)
        stop = make_stop_word(memory, _stream(context))
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
    """A new stream that waits for no other."""
    flags = context.binding.CUstream_flags
    return context.call("cuStreamCreate", flags.CU_STREAM_NON_BLOCKING)


@dataclass(frozen=True, slots=True)
class StopWord:
    """A word in device memory that tells waiting kernels to end: 0 until ``set`` copies the pinned
    ``one`` to ``word``, on a ``stream`` that waits for no kernel."""

    memory: Memory
    word: Allocation
    one: Bytes
    stream: Any

    @property
    def address(self) -> int:
        """The address that kernels read."""
        return self.word.address

    def set(self) -> None:
        """Make waiting kernels end, whatever they have computed. Does not wait for them."""
        source = self.one.ctypes.data
        with suppress(CudaError):
            self.memory.context.call(
                "cuMemcpyHtoDAsync", self.address, source, WORD_BYTES, self.stream
            )


def make_stop_word(memory: Memory, stream: Any) -> StopWord:
    """A stop word of 0. Raises OutOfMemory."""
    one = memory.pinned.zeroed(WORD_BYTES)
    one[0] = 1
    return StopWord(memory, memory.allocate("stop word", WORD_BYTES), one, stream)
